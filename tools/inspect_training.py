"""Draws what the inner training does on images, layer by layer: Vision-TTT's pictures.

Writes for each image a picture: the gradient magnitude of the patches in every layer, and the 30 %
of them with the largest. layers.csv has means over the images: of Vittt the reconstruction loss of
the first and the last mini-batch and the drift of the state, of all the coefficient of variation of
the map; loss.png is Vittt's loss along the tokens. Of ViT³ and T⁵, which take one step over all
patches, the magnitude is a patch's share of that step.

--receptive-field adds, and models of any kind have, erf.png: what the centre of the last map sees,
mean over the images, 4th root; and erf.csv: the sides of the smallest squares that hold 20, 50 and
99 % of it, drawn in white.

example: python tools/inspect_training.py vittt_t_in1k photo.jpg --checkpoint vittt.pth --out looks
"""

import argparse
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvttt.analysis.inner_training import (
    LayerTraining,
    inspect_training,
    largest_tokens,
    mixers_of,
)
from mmvttt.analysis.models import backbone_of, load_model
from mmvttt.analysis.pictures import panels, read_image, show
from mmvttt.analysis.receptive_field import SHARES, ReceptiveField, receptive_field
from mmvttt.cli import add_model_and_images, command_line, plain_errors

COLUMNS = ('loss_first', 'loss_last', 'drift', 'variation')
NAMES = {'f': 'forward', 'b': 'backward'}
# What is left of the tokens that are not kept.
DIMMED = 0.15


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_model_and_images(parser, 'work_dirs/training')
    parser.add_argument('--receptive-field', action='store_true', help='erf.png and erf.csv too')
    return parser.parse_args()


def draw_maps(picture: Tensor, layers: list[LayerTraining], target: Path) -> None:
    """The image; for each layer the map, and what its largest tokens show of the image."""
    height, width = size = tuple(picture.shape[1:])
    figure, found = panels(2 + 2 * len(layers), 6, (2.2, 2.2 * height / width + 0.2))
    show(found[0], picture)
    found[1].axis('off')
    for layer, whole, kept in zip(layers, found[2::2], found[3::2], strict=True):
        magnitude = layer.magnitude[0]
        show(whole, magnitude.unflatten(0, layer.hw), size)
        whole.set_title(layer.name.removesuffix('.mixer'), fontsize=7)
        mask = largest_tokens(magnitude).unflatten(0, layer.hw)[None, None].float()
        show(kept, picture * F.interpolate(mask, size)[0].clamp(min=DIMMED))
    figure.savefig(target, dpi=100)


def draw_loss(losses: dict[str, Tensor], directions: dict[str, str], target: Path) -> None:
    """The loss of the t-th token that a direction reads, a panel for each layer `(T, R)`."""
    figure, found = panels(len(losses), min(4, len(losses)), (3, 2.2), frame=True)
    for panel, (name, loss) in zip(found, losses.items(), strict=True):
        for line, direction in zip(loss.T, directions[name], strict=True):
            panel.plot(range(1, len(line) + 1), line.tolist(), label=NAMES[direction], lw=0.8)
        panel.set_title(name.removesuffix('.mixer'), fontsize=7)
        panel.set(xlabel='token', ylabel='loss')
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    found[0].legend(fontsize=7)
    figure.savefig(target, dpi=100)


def draw_field(found: ReceptiveField, sides: list[float], target: Path) -> None:
    """The 4th root of the field, and the squares."""
    height, width = found.field.shape
    figure, (panel,) = panels(1, 1, (4.4, 4.4 * height / width))
    show(panel, found.field**0.25)
    row, column = found.middle
    for side in sides:
        top, bottom = row - side / 2, row + side / 2
        left, right = column - side / 2, column + side / 2
        corners = [left, right, right, left, left], [top, top, bottom, bottom, top]
        panel.plot(*corners, 'w', lw=0.8)
    panel.set(xlim=(0, width), ylim=(height, 0))
    figure.savefig(target, dpi=100)


def numbers(layer: LayerTraining) -> list[float]:
    """The columns of layers.csv."""
    if layer.scan is None:
        return [float('nan')] * 3 + [layer.variation.item()]
    parts = layer.scan.loss.split(layer.scan.mini_batch_size, dim=1)
    values = (parts[0].mean(), parts[-1].mean(), layer.scan.drift.mean(), layer.variation)
    return [value.item() for value in values]


def see_training(model: torch.nn.Module, files: list[Path], size: tuple, out: Path) -> None:
    """Writes the pictures, layers.csv and loss.png."""
    totals: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    directions: dict[str, str] = {}
    for path in files:
        picture, image = read_image(path, size)
        layers = inspect_training(backbone_of(model), image[None])
        draw_maps(picture, layers, out / f'{path.stem}.png')
        for layer in layers:
            name = layer.name
            totals[name] = totals.get(name, 0) + torch.tensor(numbers(layer)) / len(files)
            if layer.scan is not None:
                directions[name] = layer.scan.directions
                loss = layer.scan.loss.mean((0, 3)) / len(files)
                losses[name] = losses.get(name, 0) + loss
    if losses:
        draw_loss(losses, directions, out / 'loss.png')
    with (out / 'layers.csv').open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(['layer', *COLUMNS])
        for name, values in totals.items():
            texts = [f'{value:.4f}' for value in values.tolist()]
            writer.writerow([name, *texts])
            known = [f'{c} {t}' for c, t in zip(COLUMNS, texts, strict=True) if t != 'nan']
            print(f'{name}: {", ".join(known)}')


def see_field(model: torch.nn.Module, files: list[Path], size: tuple, out: Path) -> None:
    """Writes erf.png and erf.csv."""
    images = torch.stack([read_image(path, size)[1] for path in files])
    found = receptive_field(model, images)
    sides = found.sides()
    draw_field(found, sides, out / 'erf.png')
    with (out / 'erf.csv').open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(['share', 'side'])
        for share, side in zip(SHARES, sides, strict=True):
            writer.writerow([share, f'{side:.0f}'])
            print(f'{share:.0%} of the receptive field in {side:.0f}×{side:.0f} pixels')


def main() -> None:
    args = parse_args()
    with plain_errors():
        found = load_model(args.model, args.cfg_options, args.checkpoint)
        args.out.mkdir(parents=True, exist_ok=True)
        rest = found.model, args.images, tuple(args.shape or found.size), args.out
        if args.receptive_field:
            see_field(*rest)
        if mixers_of(found.model) or not args.receptive_field:
            see_training(*rest)
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
