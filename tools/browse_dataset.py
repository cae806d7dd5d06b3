"""Draws the images of a data set as the model gets them, with their annotations.

example: python tools/browse_dataset.py configs/upernet_vittt_t_camvid.py --num-images 8
"""

import argparse

from rich.progress import track

from mmvttt.openmmlab.analysis.browse import browse
from mmvttt.openmmlab.cli import add_cfg_options, add_config, command_line, plain_errors, positive
from mmvttt.openmmlab.config import load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('--split', choices=('train', 'val', 'test'), default='train')
    parser.add_argument(
        '--num-images', type=positive, default=12, help='images, spread over the set'
    )
    parser.add_argument('--out', default='work_dirs/browse', help='folder of the pictures')
    add_cfg_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        pictures = browse(config, args.out, args.split, args.num_images)
        written = list(track(pictures, description='images', total=args.num_images))
    print(f'{len(written)} pictures: {args.out}')


if __name__ == '__main__':
    main()
