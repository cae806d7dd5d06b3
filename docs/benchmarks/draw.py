"""Draws plots of README and t5.md from the CSVs here: `python docs/benchmarks/draw.py`."""

import csv
from pathlib import Path

from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent
PICTURES = FOLDER.parent / 'pictures'
# Name, colour, line and offset of the label of each model. Softmax attention is grey.
LOOKS = {
    'vit3': ('ViT³', '#0072B2', '-', -12),
    't5': ('T⁵', '#009E73', '-', -8),
    'vittt': ('Vittt', '#D55E00', '-', 2),
    'deit': ('DeiT (softmax)', '#555555', '--', -4),
}


def rows(name: str) -> list[dict[str, str]]:
    with open(FOLDER / name, encoding='utf-8') as file:
        return list(csv.DictReader(file))


def look(name: str) -> tuple[str, str, str, int] | None:
    return LOOKS.get(name.partition('_')[0])


def latency() -> None:
    measured = rows('latency_cpu.csv')
    figure, axes = plt.subplots(figsize=(8, 3.8), layout='constrained')
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in measured:
        if row['mode'] == 'inference' and look(row['line']):
            pixels = int(row['height']) * int(row['width']) / 1e6
            lines.setdefault(row['line'], []).append((pixels, float(row['latency_ms'])))
    for name, points in lines.items():
        label, colour, style, below = look(name)
        axes.plot(*zip(*points, strict=True), style, color=colour, marker='o', linewidth=2.5)
        axes.annotate(
            label, points[-1], (8, below), textcoords='offset points', color=colour, fontsize=13
        )
    axes.set_title('Linear in the number of pixels, where attention is quadratic', loc='left')
    axes.set(ylabel='ms per image', ylim=0, xlim=(0, 1.4))
    axes.set_xticks([0.05, 0.262, 1.075], ['224²', '512²', '800×1344'])
    about = measured[0]
    axes.set_xlabel(f'tiny models, {about["device"]}, 2 threads, fp32', loc='left', size=10)
    finish(figure, axes, 'latency_cpu.png')


def encoders() -> None:
    measured = rows('encoders_cpu.csv')
    figure, plots = plt.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
    for axes, name in zip(plots, ('Depth Anything-S', 'DINOv2-B'), strict=True):
        for kind, colour, style in (('softmax', '#555555', '--'), ('linear', '#0072B2', '-')):
            points = [
                (int(row['height']), float(row['latency_ms']) / 1000)
                for row in measured if row['line'] == f'{name}, {kind}'
            ]  # fmt: skip
            axes.plot(*zip(*points, strict=True), style, color=colour, marker='o', linewidth=2.5)
            axes.annotate(
                kind, points[-1], (-8, 8), textcoords='offset points', color=colour, ha='right'
            )
        axes.set_title(name, loc='left')
        axes.set(ylabel='s per image', ylim=0, xlim=(400, 2200))
        axes.set_xticks([518, 1036, 1554, 2072], ['518²', '1036²', '1554²', '2072²'])
        axes.spines[['top', 'right']].set_visible(False)
    plots[0].set_xlabel(f'{measured[0]["device"]}, 2 threads, fp32', loc='left', size=10)
    figure.savefig(PICTURES / 'encoders_cpu.png', dpi=100)


def training() -> None:
    case = dict(mode='train', batch='16', height='800')
    measured = [
        r for r in rows('models_h100.csv')
        if look(r['model']) and all(r[key] == value for key, value in case.items())
    ]  # fmt: skip
    measured.sort(key=lambda row: float(row['gpu_ms']), reverse=True)
    figure, axes = plt.subplots(figsize=(8, 2.8), layout='constrained')
    names, colours, *_ = zip(*(look(row['model']) for row in measured), strict=True)
    bars = axes.barh(names, [float(row['gpu_ms']) for row in measured], color=colours)
    axes.bar_label(bars, fmt='%.0f ms', padding=4)
    axes.margins(x=0.12)
    axes.set_title('At the size of detection ViT³ trains in half of DeiT’s time', loc='left')
    axes.set_xlabel('GPU time of a step on an H100, small models, 16 × 800×1344, bf16')
    finish(figure, axes, 'models_h100.png')


def finish(figure: plt.Figure, axes: plt.Axes, name: str) -> None:
    axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(PICTURES / name, dpi=100)


if __name__ == '__main__':
    plt.rc('font', size=12)
    plt.rc('axes', titlesize=15, titleweight='bold')
    latency()
    encoders()
    training()
