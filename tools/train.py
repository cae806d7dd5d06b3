#!/usr/bin/env python3
"""Trains a model from a config of mmdet, mmsegmentation or mmpretrain.

example: mmvttt train configs/maskrcnn_vittt_s_1x.py --amp --resume
"""

import argparse
import os

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    cli.add_config(parser)
    add = parser.add_argument
    add('--work-dir', help='where to write; default: work_dirs/<name of the config>')
    help = 'resume from a checkpoint; without a path, from the latest one of the work directory'
    add('--resume', nargs='?', const='auto', metavar='CHECKPOINT', help=help)
    add('--amp', action='store_true', help='mixed precision: bf16 where the device has it')
    help = (
        'torch.compile for the blocks of backbone and adapter; the first steps take minutes. '
        'Default: on a GPU, where the config has compile_blocks'
    )
    add('--compile', action=argparse.BooleanOptionalAction, help=help)
    help = "scale the learning rate by the real batch over the config's base_batch_size"
    add('--auto-scale-lr', action='store_true', help=help)
    add('--seed', type=cli.not_negative, help='seed of all random numbers')
    add('--deterministic', action='store_true', help='choose deterministic algorithms')
    help = (
        'train the config as it is, without exact resume, checkpoints that survive a kill, and the '
        'checks of loss and machines'
    )
    add('--plain', action='store_true', help=help)
    cli.add_cfg_options(parser)
    cli.add_launcher(parser)
    args = vars(parser.parse_args())
    os.environ.setdefault('LOCAL_RANK', str(args.pop('local_rank')))
    with cli.plain_errors(args['launcher']):
        from mmvttt.openmmlab.apis.train import train

        train(**args)


if __name__ == '__main__':
    main()
