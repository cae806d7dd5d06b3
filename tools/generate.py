"""Draws images with a trained diffusion model.

The same settings give the same images with any number of GPUs; an interrupted run continues.
Batches are kept next to the output, in the folder `<name>_parts`.

example: python tools/generate.py configs/dit3_digits.py work_dirs/dit3_digits/iter_2000.pth \\
           --classes 0 1 2 3 4 5 6 7 8 9 --count 100 --steps 20 --out digits.png
several GPUs: torchrun --nproc-per-node 8 tools/generate.py … --launcher pytorch
"""

import argparse
from pathlib import Path

import torch
from mmengine.dist import init_dist, is_main_process

from mmvttt.cli import (
    add_cfg_options,
    add_config,
    add_device,
    add_launcher,
    add_shape,
    command_line,
    new_file,
    not_negative,
    plain_errors,
    positive,
)
from mmvttt.errors import UsageError
from mmvttt.models.generation.sampling import SCHEDULERS
from mmvttt.openmmlab.apis import generate as api
from mmvttt.openmmlab.apis.image_measures import load_network, measure, require_reference, score
from mmvttt.openmmlab.config import load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('checkpoint', help='file with the weights; averaged ones are taken')
    parser.add_argument('--classes', nargs='+', default=[], help='numbers of classes, or: all')
    parser.add_argument(
        '--draw-classes',
        action='store_true',
        help='draw the class of each image at random; default: as many images of each class',
    )
    parser.add_argument('--prompt', nargs='+', help='texts, for a model of prompts')
    parser.add_argument('--pipeline', help='folder of Stable Diffusion 3 with its text encoders')
    parser.add_argument('--prompts', metavar='FILE.npz', help='embedded prompts instead of texts')
    parser.add_argument('--count', type=positive, help='images; default: one a class or prompt')
    parser.add_argument('--steps', type=positive, default=50)
    parser.add_argument(
        '--guidance', type=float, default=1.0, help='classifier-free guidance; 1: none'
    )
    parser.add_argument(
        '--guided',
        choices=('all', 'three'),
        default='all',
        help='guided channels; DiT guides three',
    )
    parser.add_argument('--scheduler', choices=SCHEDULERS, help="default: the training's")
    parser.add_argument('--seed', type=not_negative, default=0)
    add_shape(parser, '--size', help='size of the image')
    parser.add_argument('--batch-size', type=positive, default=16)
    parser.add_argument('--vae', help="folder of diffusers' AutoencoderKL; pixels need none")
    parser.add_argument(
        '--out', type=new_file, default='work_dirs/generate/grid.png', help='a grid of all images'
    )
    parser.add_argument('--npz', type=new_file, help="all images, as ADM's evaluator reads them")
    parser.add_argument('--reference', help='.npz or folder of images, or .npy of features')
    parser.add_argument(
        '--features',
        help='.pt2 of torch.export: images (B, 3, H, W) in [0, 1] → (B, F); default: the pixels',
    )
    parser.add_argument(
        '--classifier',
        help='.pt2 of torch.export: images (B, 3, H, W) in [0, 1] → probabilities (B, K), for the '
        'Inception score',
    )
    add_device(parser)
    add_launcher(parser)
    add_cfg_options(parser, 'model.transformer.patch_size=4')
    return parser.parse_args(argv)


def chosen_classes(texts: list[str], count: int | None) -> tuple[int, ...]:
    if texts == ['all'] and count is not None:
        return tuple(range(count))
    if not all(text.lstrip('-').isdecimal() for text in texts):
        raise UsageError(f'--classes {" ".join(texts)}: give numbers, or: all')
    return tuple(int(text) for text in texts)


def latent_size(size: list[int] | None, shrink: int, patch: int) -> tuple[int, int] | None:
    """Height and width of the latents of an image of (height, width) pixels."""
    if size is None:
        return None
    if any(side % (shrink * patch) for side in size):
        what = f'{shrink} pixels of the image a latent, patches of {patch}'
        raise UsageError(f'--size {size[0]} {size[1]}: give multiples of {shrink * patch} ({what})')
    return size[0] // shrink, size[1] // shrink


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors(args.launcher):
        if args.launcher != 'none':
            init_dist(args.launcher)
            if args.device == 'cuda':
                args.device = f'cuda:{torch.cuda.current_device()}'
        # Checked before hours of drawing.
        extractor = load_network(args.features, '--features') if args.features else None
        classifier = load_network(args.classifier, '--classifier') if args.classifier else None
        if args.reference:
            require_reference(args.reference)
        cfg = load_config(args.config, cfg_options=args.cfg_options, launcher=args.launcher)
        model, averaged = api.load_generator(cfg, args.checkpoint, args.device)
        if not averaged and is_main_process():
            print('the checkpoint does not say that its weights are averaged; they are used as is')
        vae = api.load_autoencoder(args.vae, args.device) if args.vae else None
        prompts = None
        if args.prompts:
            prompts = api.read_prompts(args.prompts)
        elif args.prompt:
            if not args.pipeline:
                raise UsageError('--prompt needs --pipeline FOLDER, whose text encoders read it')
            prompts = api.encode_prompts(args.pipeline, args.prompt, args.device)
        if prompts and args.draw_classes:
            raise UsageError('--draw-classes is for a model of classes: leave it out')
        classes = chosen_classes(args.classes, model.data_preprocessor.num_classes)
        default = len(next(iter(prompts.values()))) if prompts else len(classes)
        # A pixel of a latent is 2^(stages − 1) pixels of the image.
        shrink = 2 ** (len(vae.config.block_out_channels) - 1) if vae else 1
        size = latent_size(args.size, shrink, model.transformer.config.patch_size)
        settings = api.Settings(
            *(args.count or max(1, default), classes, args.steps, args.guidance, args.guided),
            *(args.scheduler, args.seed, size, args.batch_size, args.draw_classes),
        )
        if args.reference and extractor is None:
            sides = settings.size or (model.transformer.config.sample_size,) * 2
            require_reference(args.reference, (shrink * sides[0], shrink * sides[1]))
        out = Path(args.npz or args.out)
        parts = out.with_name(f'{out.stem}_parts')
        files = api.generate(model, settings, parts, vae, prompts)
        if not is_main_process():
            return
        images = api.read_images(files)
        # A column for each class or prompt, if the picture stays readable.
        columns = default if 1 < default <= 32 and not args.draw_classes else None
        api.write_grid(images[:1024], args.out, columns)
        print(f'{len(images)} images of {images.shape[1]}×{images.shape[2]} → {args.out}')
        if args.npz:
            api.write_npz(images, args.npz)
            print(f'arr_0 {images.shape} → {args.npz}')
        measures = measure(images, args.reference, extractor) if args.reference else {}
        if classifier is not None:
            measures['inception_score'] = score(images, classifier)
        for name, value in measures.items():
            print(f'{name:<16} {value:.4f}')


if __name__ == '__main__':
    main()
