"""Writes a checkpoint's weights without optimizer and history, named by hash.

OUT ends in .pth, or in .safetensors, which also gets a model card.

example: python tools/publish_checkpoint.py work_dirs/vittt_s_in1k/epoch_300.pth vittt_s_in1k.pth
"""

import argparse

from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.cli import command_line, new_file, plain_errors


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('checkpoint', help='the file of a run')
    parser.add_argument('out', type=new_file, help='the new file; its hash is added to the name')
    parser.add_argument('--prefix', default='', help="keep what is under it, e.g. 'backbone.'")
    parser.add_argument('--half', action='store_true', help='store fp32 weights as fp16')
    parser.add_argument('--key', help="entry that holds the weights, e.g. 'teacher'")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        path = publish_checkpoint(args.checkpoint, args.out, args.prefix, args.half, args.key)
    print(f'{path}: {path.stat().st_size / 2**20:.1f} MiB')


if __name__ == '__main__':
    main()
