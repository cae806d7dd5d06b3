"""Makes the built-in data set: `python -m mmvttt.openmmlab.datasets.digits --root FOLDER`."""

import argparse

from . import make_digits


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m mmvttt.openmmlab.datasets.digits',
        description='Make the built-in instance-segmentation set, or find it made already.',
    )
    parser.add_argument('--root', default='data/mmvttt_digits', help='folder to make')
    parser.add_argument('--num-train', type=int, default=600, help='training images')
    parser.add_argument('--num-val', type=int, default=100, help='held-out images')
    parser.add_argument('--size', type=int, default=160, help='side of the images, in pixels')
    parser.add_argument('--seed', type=int, default=0, help='everything random follows from it')
    args = parser.parse_args(argv)
    try:
        root = make_digits(**vars(args))
    except (ValueError, FileExistsError, ModuleNotFoundError) as error:
        parser.exit(1, f'{error}\n')
    print(f'{args.num_train} training and {args.num_val} held-out images are in {root}')


if __name__ == '__main__':
    main()
