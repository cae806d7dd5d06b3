"""Prints the key shift and the attention distance of each layer, and draws implicit attention.

For T⁵ and other models of TTTMixer (mmvttt.analysis.attention). Writes layers.csv and layers.png,
means over the images, and for each image a picture: what the patch in its middle reads, layer by
layer. A ViT's own attention is that of T⁵ with SoftmaxAttention and the ViT's weights.

example: python tools/inspect_attention.py t5_t_in1k_30e photo.jpg --checkpoint t5.pth --out looks
"""

import argparse
import csv
from pathlib import Path

from torch import Tensor

from mmvttt.analysis.attention import LayerAttention, attention_distance, inspect_layers
from mmvttt.analysis.models import DenseForward, load_model
from mmvttt.analysis.pictures import panels, read_image, show
from mmvttt.cli import add_model_and_images, command_line, plain_errors
from mmvttt.errors import DataError


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_model_and_images(parser, 'work_dirs/attention')
    parser.add_argument(
        '--beside', nargs='+', type=Path, default=[], help='folders of other runs, for layers.png'
    )
    return parser.parse_args()


def draw(picture: Tensor, layers: list[LayerAttention], target: Path) -> None:
    """The image, and for each layer the magnitudes of the middle patch, mean over the heads."""
    figure, found = panels(len(layers) + 1, columns=5)
    show(found[0], picture)
    for panel, layer in zip(found[1:], layers, strict=True):
        h, w = layer.hw
        middle = h // 2 * w + w // 2
        show(panel, layer.attention.norm[0, :, middle].mean(0).unflatten(0, layer.hw))
        panel.plot(w // 2 + 0.5, h // 2 + 0.5, 'r+')
        panel.set_title(layer.name.removesuffix('.mixer'), fontsize=7)
    figure.savefig(target, dpi=100)


def draw_layers(folders: list[Path], target: Path) -> None:
    """Key shift and attention distance by layer, a line for each folder's layers.csv."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    for folder in folders:
        table = folder / 'layers.csv'
        if not table.is_file():
            raise DataError(f'{str(table)!r} is missing: give the --out of an earlier run')
        with table.open(newline='') as file:
            rows = list(csv.DictReader(file))
        for panel, column in zip(panels, ('key_shift', 'distance'), strict=True):
            values = [float(row[column]) for row in rows]
            panel.plot(range(1, len(values) + 1), values, marker='o', label=folder.name)
    for panel, label in zip(panels, ('key shift', 'attention distance, patches'), strict=True):
        panel.set(xlabel='layer', ylabel=label, ylim=(0, 1.05 * panel.get_ylim()[1]))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    args = parse_args()
    totals: dict[str, list[tuple[float, float]]] = {}
    with plain_errors():
        found = load_model(args.model, args.cfg_options, args.checkpoint)
        args.out.mkdir(parents=True, exist_ok=True)
        for path in args.images:
            picture, image = read_image(path, tuple(args.shape or found.size))
            layers = inspect_layers(DenseForward(found.model), image[None])
            known = [layer for layer in layers if layer.attention is not None]
            draw(picture, known, args.out / f'{path.stem}.png')
            for layer in layers:
                distance = float('nan')
                if layer.attention is not None:
                    distance = attention_distance(layer.attention.norm, layer.hw).mean().item()
                name = layer.name.removeprefix('model.')
                totals.setdefault(name, []).append((layer.key_shift.item(), distance))
    with (args.out / 'layers.csv').open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(['layer', 'key_shift', 'distance'])
        for name, values in totals.items():
            means = [sum(column) / len(values) for column in zip(*values, strict=True)]
            writer.writerow([name, *(f'{value:.4f}' for value in means)])
            print(f'{name}: key shift {means[0]:.4f}, attention distance {means[1]:.2f} patches')
    with plain_errors():
        draw_layers([args.out, *args.beside], args.out / 'layers.png')
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
