"""`python -m mmvttt.datasets.digits --root data/mmvttt_digits`: makes the built-in data set."""

import argparse
import inspect

from . import make_digits


def main(argv: list[str] | None = None) -> None:
    defaults = {n: p.default for n, p in inspect.signature(make_digits).parameters.items()}
    parser = argparse.ArgumentParser(
        prog='python -m mmvttt.datasets.digits',
        description='Make the built-in instance-segmentation set, or find it made already.',
    )
    parser.add_argument('--root', default='data/mmvttt_digits', help='folder to make')
    parser.add_argument('--num-train', type=int, help='training images')
    parser.add_argument('--num-val', type=int, help='held-out images')
    parser.add_argument('--size', type=int, help='side of the square images, in pixels')
    parser.add_argument('--seed', type=int, help='everything random follows from it')
    parser.set_defaults(**{n: d for n, d in defaults.items() if n != 'root'})
    args = parser.parse_args(argv)
    try:
        root = make_digits(**vars(args))
    except (ValueError, FileExistsError, ModuleNotFoundError) as error:
        parser.exit(1, f'{error}\n')
    print(f'{args.num_train} training and {args.num_val} held-out images are in {root}')


if __name__ == '__main__':
    main()
