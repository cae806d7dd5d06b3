"""Makes the built-in set of digits on photographs, or finds it made already.

example: python -m mmvttt.openmmlab.datasets.digits --root data/mmvttt_digits
"""

from mmvttt import cli

from . import make_digits


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('--root', default='data/mmvttt_digits', help='folder to make')
    add('--num-train', type=cli.positive, default=600, help='training images')
    add('--num-val', type=cli.positive, default=100, help='held-out images')
    add('--size', type=cli.positive, default=160, help='side of the images, in pixels')
    add('--seed', type=cli.not_negative, default=0, help='everything random follows from it')
    args = parser.parse_args()
    with cli.plain_errors():
        root = make_digits(**vars(args))
    print(f'{args.num_train} training and {args.num_val} held-out images are in {root}')


if __name__ == '__main__':
    main()
