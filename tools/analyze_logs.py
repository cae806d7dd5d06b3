"""Draws the curves of a run and prints its last and highest figures (mmvttt.analysis.curves).

example: python tools/analyze_logs.py work_dirs/demo --metrics coco/bbox_mAP
"""

from pathlib import Path

from mmvttt.analysis.curves import plot_curves, read_scalars, summary
from mmvttt.cli import command_line


def main(argv: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument('work_dir', help='the --work-dir of a run of tools/train.py')
    parser.add_argument(
        '--metrics', nargs='+', help='evaluated scalars, e.g. coco/bbox_mAP_50 (default: all)'
    )
    parser.add_argument('--out', help='image file (default: curves.png in the work directory)')
    args = parser.parse_args(argv)
    try:
        train, evaluated = read_scalars(args.work_dir)
        out = Path(args.out or Path(args.work_dir) / 'curves.png')
        plot_curves(train, evaluated, out, args.metrics)
    except (FileNotFoundError, KeyError, ValueError) as error:
        parser.exit(1, f'{error.args[0]}\n')
    print(summary(train, evaluated, args.metrics))
    print(f'curves: {out}')


if __name__ == '__main__':
    main()
