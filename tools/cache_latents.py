#!/usr/bin/env python3
"""Computes the latents of images once, for training diffusion models.

There is one folder of images for each class.

example: mmvttt cache_latents data/imagenet/train sd-vae-ft-ema data/latents_256
"""

from mmvttt import cli
from mmvttt.text import one_line


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('images', help='a folder with a folder of images for each class')
    add('autoencoder', help="a folder of diffusers' AutoencoderKL")
    add('out', type=cli.new_folder, help='the folder to write')
    add('--size', type=cli.positive, default=256, help='side of the images in pixels')
    add('--batch-size', type=cli.positive, default=32)
    add('--num-workers', type=cli.not_negative, default=4)
    help = 'number type of the file'
    add('--dtype', choices=('float16', 'float32'), default='float16', help=help)
    cli.add_device(parser)
    args = parser.parse_args()
    with cli.plain_errors():
        from mmvttt.openmmlab.apis.generate import load_autoencoder
        from mmvttt.openmmlab.datasets.latents import ClassFolders, cache_latents

        images = ClassFolders(args.images, args.size)
        autoencoder = load_autoencoder(args.autoencoder, args.device or cli.default_device())
        cache_latents(autoencoder, images, args.out, args.batch_size, args.num_workers, args.dtype)
        print(one_line(f'{len(images)} images of {len(images.classes)} classes → {args.out}'))


if __name__ == '__main__':
    main()
