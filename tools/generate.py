#!/usr/bin/env python3
"""Draws images with a trained diffusion model.

The same settings give the same images with any number of GPUs.

example: mmvttt generate configs/dit3_digits.py work_dirs/dit3_digits/iter_2000.pth \\
           --classes 0 1 2 3 4 5 6 7 8 9 --count 100 --steps 20 --out digits.png
several GPUs: torchrun --nproc-per-node 8 tools/generate.py … --launcher pytorch
"""

from pathlib import Path

from mmvttt import cli
from mmvttt.errors import UsageError
from mmvttt.text import one_line


def main() -> None:
    parser = cli.command_line(__doc__)
    cli.add_config(parser)
    add = parser.add_argument
    add('checkpoint', help='file with the weights; averaged ones are taken')
    add('--classes', nargs='+', default=[], help='numbers of classes, or: all')
    add('--prompt', nargs='+', help='texts, for a model of prompts')
    add('--pipeline', help='folder of Stable Diffusion 3 with its text encoders')
    add('--count', type=cli.positive, help='images; default: one a class or prompt')
    add('--steps', type=cli.positive, default=50)
    add('--guidance', type=float, default=1.0, help='classifier-free guidance; 1: none')
    add('--guided', choices=('all', 'three'), default='all', help='channels; DiT guides three')
    add('--scheduler', help="ddpm, ddim, dpm++, unipc or euler; default: the training's")
    add('--seed', type=cli.not_negative, default=0)
    cli.add_shape(parser, '--size', help='size of the image')
    add('--batch-size', type=cli.positive, default=16)
    add('--vae', help="folder of diffusers' AutoencoderKL; pixels need none")
    add('--out', type=cli.new_file, default='work_dirs/generate/grid.png', help='a grid of images')
    add('--npz', type=cli.new_file, help="all images, as ADM's evaluator reads them")
    cli.add_device(parser)
    cli.add_launcher(parser)
    cli.add_cfg_options(parser, 'model.transformer.patch_size=4')
    args = parser.parse_args()
    if args.classes != ['all'] and not all(text.isdecimal() for text in args.classes):
        parser.error(f'--classes {" ".join(args.classes)}: give numbers, or: all')
    if args.prompt and not args.pipeline:
        parser.error('--prompt needs --pipeline FOLDER, whose text encoders read it')
    with cli.plain_errors(args.launcher):
        import numpy as np
        import torch
        from mmengine.dist import init_dist

        from mmvttt.openmmlab.apis import generate as api
        from mmvttt.openmmlab.config import load_config

        args.device = args.device or cli.default_device()
        if args.launcher != 'none':
            init_dist(args.launcher)
            if args.device == 'cuda':
                args.device = f'cuda:{torch.cuda.current_device()}'
        cfg = load_config(args.config, cfg_options=args.cfg_options, launcher=args.launcher)
        model = api.load_generator(cfg, args.checkpoint, args.device)
        vae = api.load_autoencoder(args.vae, args.device) if args.vae else None
        prompts, classes = None, [int(text) for text in args.classes if text != 'all']
        if args.prompt:
            prompts = api.encode_prompts(args.pipeline, args.prompt, args.device)
        elif args.classes == ['all']:
            classes = list(range(model.num_classes or 0))
        default = len(args.prompt or classes)
        # A pixel of a latent is 2^(stages − 1) pixels of the image.
        shrink = 2 ** (len(vae.config.block_out_channels) - 1) if vae else 1
        least = shrink * model.transformer.config.patch_size
        if any(side % least for side in args.size or ()):
            raise UsageError(f'--size {args.size[0]} {args.size[1]}: give multiples of {least}')
        images = api.generate(
            model,
            args.count or max(1, default),
            classes,
            prompts,
            autoencoder=vae,
            steps=args.steps,
            guidance=args.guidance,
            guided=args.guided,
            scheduler=args.scheduler,
            seed=args.seed,
            size=(args.size[0] // shrink, args.size[1] // shrink) if args.size else None,
            batch_size=args.batch_size,
        )
        if images is None:
            return
        # A column for each class or prompt, if the picture stays readable.
        api.write_grid(images[:1024], args.out, default if 1 < default <= 32 else None)
        print(one_line(f'{len(images)} images of {images.shape[1]}×{images.shape[2]} → {args.out}'))
        if args.npz:
            Path(args.npz).parent.mkdir(parents=True, exist_ok=True)
            np.savez(args.npz, images)
            print(one_line(f'arr_0 {images.shape} → {args.npz}'))


if __name__ == '__main__':
    main()
