"""Draws the curves of runs and prints their figures (mmvttt.analysis.curves).

For one run the last and the highest value; for several, on shared axes, a table of mean and
standard deviation, such as for the seeds of one setting.

example: python tools/analyze_logs.py work_dirs/demo --metrics coco/bbox_mAP
         python tools/analyze_logs.py work_dirs/seed_* --out seeds.png
"""

import os
from pathlib import Path

from mmvttt import cli
from mmvttt.analysis import curves


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('work_dirs', nargs='+', help='the --work-dir of runs of tools/train.py')
    add('--metrics', nargs='+', help='evaluated scalars, e.g. coco/bbox_mAP_50 (default: all)')
    help = 'image file (default: curves.png in the work directory of the first run)'
    add('--out', type=cli.new_file, help=help)
    args = parser.parse_args()
    try:
        # Named without the path that all runs of a machine share.
        runs = {
            os.path.relpath(folder).removeprefix('work_dirs/'): curves.read_scalars(folder)
            for folder in args.work_dirs
        }
        out = args.out or Path(args.work_dirs[0]) / 'curves.png'
        out = curves.plot_curves(runs, out, args.metrics)
    except (FileNotFoundError, KeyError, ValueError) as error:
        parser.exit(1, f'{error.args[0]}\n')
    if len(runs) > 1:
        print(curves.spread_table(runs, args.metrics))
    else:
        print(curves.summary(*next(iter(runs.values())), args.metrics))
    print(f'curves: {out}')


if __name__ == '__main__':
    main()
