"""Draws docs/pictures/cifar10.png and cifar10_transfer.png from docs/benchmarks/*_nano*.csv.

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
MARKS = {'0': 'o-', '1': 's--', '2': '^:'}
BUDGETS = {
    ('cifar10_vit_linear_nano', 'cifar10_vit_nano'): 'linearized (T⁵)',
    ('cifar10_vit_nano', 'cifar10_vit_nano'): 'the softmax ViT, trained on',
    ('cifar10_vit_linear_nano', 'random'): 'T⁵ from random weights',
}


def rows(name: str) -> list[dict[str, str]]:
    with open(DOCS / 'benchmarks' / name, encoding='utf-8') as file:
        return list(csv.DictReader(file))


TRANSFER = {
    'pennfudan_nano.csv': ('coco/bbox_mAP_50', 'Mask R-CNN on Penn-Fudan', 'box AP50'),
    'camvid_nano.csv': ('mIoU', 'UPerNet on CamVid', 'mIoU, %'),
}


@styled
def draw_transfer() -> None:
    """The mean of the seeds by epoch, and the band from the worst to the best."""
    figure, axes = panels(1, 2, (6.5, 4.8))
    for panel, (file, (metric, title, ylabel)) in zip(axes, TRANSFER.items(), strict=True):
        curves = defaultdict(lambda: defaultdict(list))
        for row in rows(file):
            backbone = 'Vittt' if 'vittt' in row['config'] else 'ViT, softmax'
            start = 'random' if row['backbone_from'] == 'random' else 'CIFAR-10'
            curves[backbone, start][int(row['epoch'])].append(float(row[metric]))
        for (backbone, start), curve in curves.items():
            epochs, found = list(curve), [*curve.values()]
            (line,) = panel.plot(
                epochs,
                [np.mean(values) for values in found],
                'o-' if start == 'CIFAR-10' else 'o--',
                color='C0' if backbone == 'Vittt' else 'C1',
                label=f'{backbone}, from {start} weights',
            )
            low, high = ([pick(values) for values in found] for pick in (min, max))
            panel.fill_between(epochs, low, high, color=line.get_color(), alpha=0.12)
        panel.set(title=title, xlabel='epoch', ylabel=ylabel)
        panel.grid(True)
        panel.legend()
    save(figure, DOCS / 'pictures' / 'cifar10_transfer.png')


@styled
def draw_training() -> None:
    figure, (left, right) = panels(1, 2, (6.5, 4.8))
    losses = defaultdict(list)
    for row in rows('cifar10_nano_loss.csv'):
        if row['scalar'] == 'loss':
            losses[row['run']].append((int(row['step']), float(row['value'])))
    for name, points in losses.items():
        left.plot(*zip(*points, strict=True), label=name)
    left.set(title='Training from random weights', xlabel='step of 64 images', ylabel='loss')
    results = rows('cifar10_nano.csv')
    for i, ((variant, start), name) in enumerate(BUDGETS.items()):
        for seed, mark in MARKS.items():
            found = sorted(
                (100 * int(row['steps']) / STEPS, float(row['top1']))
                for row in results
                if (row['variant'], row['start'], row['seed']) == (variant, start, seed)
            )
            if found:
                label = name if seed == '0' else f'{name}, seed {seed}'
                right.plot(*zip(*found, strict=True), mark, color=f'C{i}', label=label)
    for seed, mark in MARKS.items():
        source = next(
            float(row['top1'])
            for row in results
            if (row['variant'], row['start'], row['seed']) == ('cifar10_vit_nano', 'random', seed)
        )
        label = 'the softmax ViT' if seed == '0' else f'the softmax ViT, seed {seed}'
        right.axhline(source, color='black', linestyle=mark[1:], linewidth=1, label=label)
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
    draw_training()
    draw_transfer()
