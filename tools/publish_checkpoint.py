#!/usr/bin/env python3
"""Writes a checkpoint's weights without optimizer and history, named by hash.

OUT ends in .pth, or in .safetensors, which also gets a model card.

example: mmvttt publish_checkpoint work_dirs/vittt_s_in1k/epoch_300.pth vittt_s_in1k.pth
"""

from mmvttt import cli
from mmvttt.text import one_line


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('checkpoint', help='the file of a run')
    add('out', type=cli.new_file, help='the new file; its hash is added to the name')
    add('--prefix', default='', help="keep what is under it, e.g. 'backbone.'")
    add('--half', action='store_true', help='store fp32 weights as fp16')
    args = parser.parse_args()
    with cli.plain_errors():
        from mmvttt.checkpoints.publish import publish_checkpoint

        path = publish_checkpoint(args.checkpoint, args.out, args.prefix, args.half)
    print(one_line(f'{path}: {path.stat().st_size / 2**20:.1f} MiB'))


if __name__ == '__main__':
    main()
