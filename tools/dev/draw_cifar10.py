"""Draws docs/pictures/cifar10.png from docs/benchmarks/cifar10_nano*.csv.

example: python tools/analyze_logs.py A B --csv docs/benchmarks/cifar10_nano_loss.csv
         python tools/dev/draw_cifar10.py
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from mmvttt.analysis.pictures import panels, save, styled

DOCS = Path(__file__).resolve().parents[2] / 'docs'
STEPS = 6248
BUDGETS = {
    ('cifar10_vit_linear_nano', 'cifar10_vit_nano'): 'linearized (T⁵)',
    ('cifar10_vit_nano', 'cifar10_vit_nano'): 'the softmax ViT, trained on',
    ('cifar10_vit_linear_nano', 'random'): 'T⁵ from random weights',
}


def rows(name: str) -> list[dict[str, str]]:
    with open(DOCS / 'benchmarks' / name, encoding='utf-8') as file:
        return list(csv.DictReader(file))


@styled
def main() -> None:
    figure, (left, right) = panels(1, 2, (6.5, 4.8))
    losses = defaultdict(list)
    for row in rows('cifar10_nano_loss.csv'):
        if row['scalar'] == 'loss':
            losses[row['run']].append((int(row['step']), float(row['value'])))
    for name, points in losses.items():
        left.plot(*zip(*points, strict=True), label=name)
    left.set(title='Training from random weights', xlabel='step of 64 images', ylabel='loss')
    results = rows('cifar10_nano.csv')
    for key, name in BUDGETS.items():
        found = sorted(
            (100 * int(r['steps']) / STEPS, float(r['top1']))
            for r in results
            if (r['variant'], r['start']) == key
        )
        if found:
            right.plot(*zip(*found, strict=True), 'o-', label=name)
    source = next(float(r['top1']) for r in results if r['variant'] == 'cifar10_vit_nano')
    right.axhline(source, color='black', linestyle=':', label='the softmax ViT')
    right.set(
        title='Fine-tuning a softmax ViT that became linear',
        xlabel='% of the steps of its training',
        ylabel='top-1, %',
        xticks=np.arange(0, 26, 5),
    )
    for panel in (left, right):
        panel.grid(True)
        panel.legend()
    save(figure, DOCS / 'pictures' / 'cifar10.png')


if __name__ == '__main__':
    main()
