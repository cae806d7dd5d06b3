"""Draws the curves of runs and prints their figures (mmvttt.analysis.curves).

For one run the last and the highest value; for several, on shared axes, a table of mean and
standard deviation, such as for the seeds of one setting.

example: python tools/analyze_logs.py work_dirs/demo --metrics coco/bbox_mAP
         python tools/analyze_logs.py work_dirs/seed_* --out seeds.png
"""

import os
from pathlib import Path

from mmvttt.analysis.curves import (
    plot_curves,
    read_scalars,
    scalar_rows,
    spread_table,
    summary,
)
from mmvttt.analysis.tables import write_csv
from mmvttt.cli import command_line, new_file


def main(argv: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument('work_dirs', nargs='+', help='the --work-dir of runs of tools/train.py')
    parser.add_argument(
        '--metrics', nargs='+', help='evaluated scalars, e.g. coco/bbox_mAP_50 (default: all)'
    )
    parser.add_argument(
        '--out',
        type=new_file,
        help='image file (default: curves.png in the work directory of the first run)',
    )
    parser.add_argument(
        '--csv', type=new_file, metavar='FILE', help='also write the numbers to this file'
    )
    args = parser.parse_args(argv)
    try:
        runs = {_name(folder): read_scalars(folder) for folder in args.work_dirs}
        out = args.out or Path(args.work_dirs[0]) / 'curves.png'
        out = plot_curves(runs, out, args.metrics)
        if args.csv:
            write_csv(scalar_rows(runs, args.metrics), args.csv)
    except (FileNotFoundError, KeyError, ValueError) as error:
        parser.exit(1, f'{error.args[0]}\n')
    if len(runs) > 1:
        print(spread_table(runs, args.metrics))
    else:
        print(summary(*next(iter(runs.values())), args.metrics))
    print(f'curves: {out}')


def _name(folder: str) -> str:
    """A run's folder without the path that all runs of a machine share."""
    return os.path.relpath(folder).removeprefix('work_dirs/')


if __name__ == '__main__':
    main()
