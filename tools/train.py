"""Trains a model from a config of mmdet, mmsegmentation or mmpretrain.

example: python tools/train.py configs/maskrcnn_vittt_s_1x.py --amp --resume
"""

import argparse
import os

from mmvttt.cli import add_cfg_options, add_config, add_launcher, command_line, plain_errors
from mmvttt.openmmlab.apis.train import train


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument(
        '--work-dir', help='where to write; default: work_dirs/<name of the config>'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from a checkpoint; without a path, from the latest one of the work directory',
    )
    parser.add_argument(
        '--amp', action='store_true', help='mixed precision: bf16 where the device has it'
    )
    parser.add_argument(
        '--compile',
        action=argparse.BooleanOptionalAction,
        help='torch.compile for the blocks of backbone and adapter; the first steps take minutes. '
        'Default: on a GPU, where the config has compile_blocks',
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help="scale the learning rate by the real batch over the config's base_batch_size",
    )
    parser.add_argument('--seed', type=int, help='seed of all random numbers')
    parser.add_argument(
        '--deterministic', action='store_true', help='choose deterministic algorithms'
    )
    parser.add_argument(
        '--plain',
        action='store_true',
        help='train the config as it is, without exact resume, checkpoints that survive a kill, '
        'and the checks of loss and machines',
    )
    add_cfg_options(parser)
    add_launcher(parser)
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    os.environ.setdefault('LOCAL_RANK', str(args.pop('local_rank')))
    with plain_errors(args['launcher']):
        train(**args)


if __name__ == '__main__':
    main()
