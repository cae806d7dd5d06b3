"""Computes the latents of images once, for training diffusion models.

There is one folder of images for each class. An interrupted run continues.

example: python tools/cache_latents.py data/imagenet/train sd-vae-ft-ema data/latents_256
"""

import argparse

from mmvttt.cli import add_device, command_line, new_folder, not_negative, plain_errors, positive


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('images', help='a folder with a folder of images for each class')
    parser.add_argument('autoencoder', help="a folder of diffusers' AutoencoderKL")
    parser.add_argument('out', type=new_folder, help='the folder to write')
    parser.add_argument('--size', type=positive, default=256, help='side of the images in pixels')
    parser.add_argument('--batch-size', type=positive, default=32)
    parser.add_argument('--num-workers', type=not_negative, default=4)
    parser.add_argument(
        '--dtype', choices=('float16', 'float32'), default='float16', help='number type of the file'
    )
    add_device(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        from mmvttt.openmmlab.apis.generate import load_autoencoder
        from mmvttt.openmmlab.datasets.latents import ClassFolders, cache_latents

        images = ClassFolders(args.images, args.size)
        autoencoder = load_autoencoder(args.autoencoder, args.device)
        cache_latents(autoencoder, images, args.out, args.batch_size, args.num_workers, args.dtype)
        print(f'{len(images)} images of {len(images.classes)} classes → {args.out}')


if __name__ == '__main__':
    main()
