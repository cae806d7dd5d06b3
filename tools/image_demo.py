"""Shows what a trained model sees in photographs (mmvttt.apis.inference).

Boxes and masks, a label map or the five likeliest classes, by the toolbox of the config.

example: python tools/image_demo.py photo.jpg --config configs/upernet_vittt_t_camvid.py \\
           --checkpoint work_dirs/upernet_vittt_t_camvid/epoch_100.pth
"""

import argparse

import torch
from rich.progress import track

from mmvttt.apis.inference import show_images
from mmvttt.cli import (
    add_cfg_options,
    add_config,
    command_line,
    plain_errors,
    printable,
    usable_device,
)
from mmvttt.config import load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('images', nargs='+', help='image files')
    add_config(parser, '--config', required=True)
    parser.add_argument('--checkpoint', required=True, help='file with the weights')
    parser.add_argument('--out', default='work_dirs/image_demo', help='folder of the pictures')
    parser.add_argument(
        '--score-thr', type=float, default=0.3, help='draw boxes from this score on'
    )
    parser.add_argument(
        '--device',
        type=usable_device,
        default='cuda' if torch.cuda.is_available() else 'cpu',
    )
    add_cfg_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        findings = show_images(
            config, args.checkpoint, args.images, args.out, args.score_thr, args.device
        )
        for finding in track(findings, description='images', total=len(args.images)):
            lines = '; '.join(finding.lines) or 'nothing'
            print(printable(f'{finding.image}: {lines} → {finding.picture}'))


if __name__ == '__main__':
    main()
