"""Lists the content of a checkpoint: entries, classes, tensors, parameters of each part.

See mmvttt.checkpoints.publish.

example: python tools/checkpoint_info.py work_dirs/vittt_s_in1k/epoch_300.pth --depth 3
"""

import argparse

from mmvttt.checkpoints.publish import describe_checkpoint
from mmvttt.cli import command_line, plain_errors, positive, printable


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('checkpoint', help='a file, URL or name on a hub')
    parser.add_argument(
        '--depth', type=positive, default=2, help='levels of modules to list; default: 2'
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        print(printable(describe_checkpoint(args.checkpoint, args.depth)))


if __name__ == '__main__':
    main()
