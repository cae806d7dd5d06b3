"""Makes a checkpoint of a linear classifier from a vision transformer's, to be fine-tuned.

For mmvttt.T5, from a ViT or DeiT of timm or mmpretrain; with --model for mmvttt.TimmViT, from that
model of timm. The target has the names of an mmpretrain classifier, backbone.* and head.fc.*. New
tensors are not in it: they are initialised at random, and need a higher learning rate (docs/t5.md).

example: python tools/inherit_weights.py deit_tiny.pth t5_tiny_inherited.pth
"""

import argparse

from mmvttt.cli import add_shape, command_line, new_file, plain_errors
from mmvttt.convert.inherit import inherit_checkpoint


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        'source', help='a checkpoint of a ViT: a file or folder, a URL, timm://NAME.TAG'
    )
    parser.add_argument('target', type=new_file, help='the file to write')
    parser.add_argument('--ema', action='store_true', help='take the averaged weights of the file')
    parser.add_argument('--key', help="entry that holds the weights, e.g. 'teacher'")
    parser.add_argument('--model', help="name of the source in timm's registry, for TimmViT")
    parser.add_argument(
        '--without',
        choices=('attention', 'mlp'),
        help='leave this part of the blocks at random, as the partial inheritance of t5 Tab. 10',
    )
    add_shape(
        parser,
        '--img-size',
        default=(224, 224),
        help='of the images that the positions of the source are for, where their number does not '
        'tell: no square, or no row for the class token (FlexiViT: 240 240)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with plain_errors():
        result = inherit_checkpoint(
            args.source,
            args.target,
            ema=args.ema,
            img_size=tuple(args.img_size),
            model=args.model,
            key=args.key,
            without=args.without,
        )
    print(result)
    print(f'wrote {len(result.weights) + len(result.head)} tensors to {args.target}')


if __name__ == '__main__':
    main()
