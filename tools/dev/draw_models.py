"""Draws the time per image of whole models on a GPU against the side of the image.

example: python tools/dev/draw_models.py docs/benchmarks/models_h100.csv \\
             docs/pictures/models_h100.png
"""

import csv
import sys

from mmvttt.analysis.pictures import LINES, panels, save, styled

NAMES = {
    'vittt_small_patch16_224': 'Vittt-S',
    'vit3_small_patch16_224': 'ViT³-S',
    't5_small_patch16_224': 'T⁵-S',
    'deit_small_patch16_224': 'DeiT-S',
    'h_vit3_tiny': 'H-ViT³-T',
    'swin_tiny_patch4_window7_224': 'Swin-T',
}
# The largest batch of each size: small ones show nothing but the host.
MOST = {('224', '224'): '128', ('800', '1344'): '16', ('1280', '1280'): '8'}
# Column of the dotted line, and what it is.
MODES = {
    'train': ('training', 'gpu_ms', 'dotted: sum of the GPU’s kernels'),
    'infer': ('inference', 'cuda_graph_ms', 'dotted: by a CUDA graph'),
}


@styled
def draw(source: str, out: str) -> None:
    with open(source, encoding='utf-8') as file:
        rows = [r for r in csv.DictReader(file) if MOST[r['height'], r['width']] == r['batch']]
    first = rows[0]
    figure, axes = panels(1, 2, (6.2, 5.0))
    for panel, (mode, (title, column, dotted)) in zip(axes, MODES.items(), strict=True):
        for (model, name), colour in zip(NAMES.items(), LINES, strict=False):
            for field, style in (('wall_ms', 'o-'), (column, 'o:')):
                points = [
                    ((int(r['height']) * int(r['width'])) ** 0.5, float(r[field]) / int(r['batch']))
                    for r in rows
                    if r['model'] == model and r['mode'] == mode and r[field]
                ]
                if points:
                    label = name if field == 'wall_ms' else None
                    panel.plot(*zip(*sorted(points), strict=True), style, color=colour, label=label)
        panel.set(xscale='log', yscale='log', xlabel='side of the image, pixels')
        panel.set_title(f'{title}; {dotted}', fontsize=12)
        panel.set_xticks([224, 1037, 1280], ['224²\n×128', '800×1344\n×16', '1280²\n×8'])
        for tick, side in zip(panel.get_xticklabels(), ('center', 'right', 'left'), strict=True):
            tick.set(horizontalalignment=side, fontsize=11)
        panel.minorticks_off()
        panel.grid(visible=True)
    axes[0].set_ylabel('ms per image')
    axes[0].legend()
    figure.suptitle(
        f'Solid: wall time in eager mode, which the host’s Python limits. {first["gpu"]},\n'
        f'bf16 autocast, torch {first["torch"]}, Triton {first["triton"]}, commit '
        f'{first["commit"]}',
        fontsize=12,
    )
    save(figure, out)


if __name__ == '__main__':
    draw(*sys.argv[1:])
