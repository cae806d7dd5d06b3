"""Converts public ViT³, H-ViT³, T⁵, DiT³, DiT⁵ and DiT checkpoints to ours, or ours to public ones.

example: python tools/convert_checkpoint.py vit3_small_public.pth vit3_small.pth
"""

import argparse

from mmvttt.cli import command_line, new_file, plain_errors, positive
from mmvttt.convert import convert_checkpoint


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('source', help='a checkpoint of classification, detection or segmentation')
    parser.add_argument('target', type=new_file, help='the file to write')
    parser.add_argument(
        '--to',
        choices=('ours', 'public', 'diffusers'),
        default='ours',
        help="diffusers: the names of diffusers' DiT, for DiT and DiT⁵",
    )
    parser.add_argument(
        '--ema', action='store_true', help="take the averaged weights (of EMA, or MESA's teacher)"
    )
    parser.add_argument(
        '--sample-size',
        type=positive,
        help='side of the latents whose positions a public DiT³, DiT⁵ or DiT has; default: as in '
        'the source',
    )
    parser.add_argument(
        '--without',
        choices=('attention', 'mlp'),
        help='leave this part of the blocks out, for the partial inheritance of t5 Tab. 10',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with plain_errors():
        conversion = convert_checkpoint(
            args.source,
            args.target,
            to=args.to,
            ema=args.ema,
            sample_size=args.sample_size,
            without=args.without,
        )
    print(conversion)
    if not conversion.complete:
        raise SystemExit(
            f'error: {len(conversion.missing)} tensors are missing and '
            f'{len(conversion.left_over)} are left over; nothing was written'
        )
    print(f'wrote {len(conversion.weights)} tensors to {args.target}')
    if conversion.caution:
        print(conversion.caution)


if __name__ == '__main__':
    main()
