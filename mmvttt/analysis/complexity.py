"""Cost against the size of the image: memory from shapes, curves (vision-ttt Fig. 6)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .fake_run import fake_copy, values_are_errors

_MEBI = 2**20
# Columns of a table with their titles.
PANELS = {
    'gflops': 'GFLOPs (multiply-accumulates)',
    'peak_mib': 'peak memory, MiB',
    'latency_ms': 'latency, ms / batch',
}


def computed_peak(network: nn.Module, images: tuple[int, ...], train: bool = False) -> float:
    """Computes the peak memory of a batch in MiB from shapes at fp32, without running it.

    Counts activations and, in training, gradients, but not weights, images or kernels' workspaces.

    Args:
        network: May be on the meta device.
        images: Shape of the images, `(B, C, H, W)`.
        train: Whether to run the backward pass too.
    """
    # Loads torch.distributed.
    from torch.distributed._tools.mem_tracker import MemTracker

    network, image = fake_copy(network, images)
    network.train(train)
    if not train:
        network.requires_grad_(False)
    # The tracker hooks the gradients of all parameters: frozen ones go to the buffers.
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                module._buffers[name] = module._parameters.pop(name)
    tracker = MemTracker()
    tracker.track_external(network, image)
    before = _total(tracker.get_tracker_snapshot('current'))
    with values_are_errors(network), torch.set_grad_enabled(train), tracker:
        out = network(image)
        if train:
            floats = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            sum(x.float().sum() for x in floats).backward()
    return (_total(tracker.get_tracker_snapshot('peak')) - before) / _MEBI


def _total(snapshot: Any) -> int:
    """Bytes of all kinds of tensors on all devices."""
    return sum(held['Total'] for held in snapshot.values())


def lines_of(rows: Sequence[Mapping[str, Any]], field: str) -> dict[str, list[tuple[float, float]]]:
    """Points (side in pixels, value) of each `line` in rows of tools/benchmark.py.

    The side is √(height·width).
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(field):
            side = (row['height'] * row['width']) ** 0.5
            lines.setdefault(row['line'], []).append((side, row[field]))
    return {name: sorted(points) for name, points in lines.items()}


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Log-log slope of the last two points against the tokens: 1 is linear, 2 quadratic."""
    if len(points) < 2 or points[-2][0] == points[-1][0]:
        return None
    (x0, y0), (x1, y1) = points[-2:]
    return math.log(y1 / y0) / (2 * math.log(x1 / x0))


def plot(
    rows: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    fields: Sequence[str] = tuple(PANELS),
) -> Path:
    """Draws a panel for each measured column of `fields` against the size of the image.

    Both axes are logarithmic. The legend has each line's slope against the tokens. Lines of models
    without a part of mmvttt's (`ours`) are dashed, those of materialised attention dotted.
    """
    # Not at the top: matplotlib is an extra, and measuring needs none.
    from .pictures import beside_panel, panels, save, styled

    @styled
    def draw() -> Path:
        drawn = [name for name in fields if lines_of(rows, name)]
        figure, axes = panels(1, len(drawn), (10.0, 5.2))
        sizes = sorted({(row['height'], row['width']) for row in rows}, key=math.prod)
        sides = [math.prod(size) ** 0.5 for size in sizes]
        names = [f'{h}×{w}' if h != w else f'{h}' for h, w in sizes]
        theirs = {row['line'] for row in rows if row.get('ours') is False}
        for panel, field in zip(axes, drawn, strict=True):
            for i, (name, points) in enumerate(lines_of(rows, field).items()):
                steep = slope(points)
                label = name if steep is None else f'{name}: {steep:.2f}'
                style = ':' if 'materialised' in name else '--' if name in theirs else '-'
                # Colours repeat after seven lines.
                marker = 'os^'[i // 7 % 3]
                panel.plot(*zip(*points, strict=True), style, marker=marker, label=label)
            panel.set(xscale='log', yscale='log', ylabel=PANELS[field])
            panel.set_xlabel('image size, pixels')
            panel.set_xticks(sides, names, rotation=45)
            # The cost axis keeps them: below a decade they have the only labels.
            panel.xaxis.minorticks_off()
            panel.grid(visible=True)
            beside_panel(panel, title='1 is linear in the pixels, 2 quadratic', fontsize=10)
        return save(figure, path)

    return draw()
