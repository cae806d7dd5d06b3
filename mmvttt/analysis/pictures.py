"""Common style of the tools' pictures: images, maps over them, lines, titles, units."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch
from torch import Tensor

from ..checkpoints.atomic_write import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Perceptually uniform colours for values that are never negative, and colour-blind safe colours for
# lines (Okabe and Ito).
COLOURS = 'viridis'
LINES = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
# Decorates functions that draw: matplotlib reads its settings while a figure is made.
styled = mpl.rc_context(
    {
        'font.size': 14,
        'axes.titlesize': 14,
        'axes.grid': False,
        'axes.spines.top': False,
        'axes.spines.right': False,
        'axes.prop_cycle': mpl.cycler(color=LINES),  # type: ignore[attr-defined]
        'grid.alpha': 0.3,
        'legend.fontsize': 12,
        'legend.frameon': False,
        'lines.linewidth': 2.0,
    }
)


def panels(
    rows: int,
    columns: int,
    size: tuple[float, float] = (3.0, 3.2),
    title: str | None = None,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Makes a figure of panels `size` (width, height) in inches, and lists them row by row.

    Args:
        rows, columns: Size of the grid.
        size: Size of one panel.
        title: Title above all panels.
        options: See `Figure.subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout='constrained')
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    if title:
        figure.suptitle(title)
    return figure, axes


def image_panels(
    count: int, columns: int, size: tuple[int, int], title: str | None = None
) -> tuple[Figure, list[Axes]]:
    """Makes `count` panels without axes for images of `size` (height, width), three inches wide."""
    columns = min(columns, count)
    shape = (3.0, 3.0 * size[0] / size[1] + 0.4)
    figure, axes = panels(-(-count // columns), columns, shape, title)
    for panel in axes:
        panel.axis('off')
    return figure, axes[:count]


def show_image(panel: Axes, picture: Tensor, title: str | None = None) -> None:
    """Draws an image `(3, H, W)` with values in [0, 1]."""
    height, width = picture.shape[1:]
    pixels = picture.permute(1, 2, 0).clamp(0, 1).cpu().numpy()
    panel.imshow(pixels, extent=(0, width, height, 0), interpolation='nearest')
    panel.set_title(title)


def show_map(
    panel: Axes, values: Tensor, size: tuple[int, int], title: str | None = None
) -> object:
    """Draws a map `(h, w)` from 0 to 1 over an image of `size` (height, width)."""
    drawn = panel.imshow(
        values.detach().cpu().numpy(),
        extent=(0, size[1], size[0], 0),
        interpolation='nearest',
        cmap=COLOURS,
        vmin=0,
        vmax=1,
    )
    panel.set_title(title)
    return drawn


def block_title(name: str) -> str:
    """Title of a block in any model: `stages.2.blocks.0` is 'stage 3, block 1'."""
    parts = re.findall(r'(?:^|\.)([A-Za-z_]+?)s?\.(\d+)', name)
    return ', '.join(f'{kind} {int(index) + 1}' for kind, index in parts) or name


def cut_middle(name: str) -> str:
    """A name, without its middle if it has more than 28 characters."""
    return name if len(name) <= 28 else f'{name[:13]}…{name[-14:]}'


def beside_panel(panel: Axes, **options: Any) -> None:
    """Puts the legend to the right of a panel, where it hides no line."""
    panel.legend(loc='upper left', bbox_to_anchor=(1.01, 1), **options)


def root_scale(values: Tensor) -> Tensor:
    """√(values / maximum), or / four means if that is more: a uniform map becomes ½, not 1."""
    return (values / torch.maximum(values.max(), 4 * values.mean())).sqrt()


def colour_bar(figure: Figure, drawn: object, axes: Sequence[Axes], label: str) -> None:
    """Draws the scale of `show_map`, which all these panels share."""
    bar = figure.colorbar(drawn, ax=list(axes), fraction=0.03, pad=0.01)
    bar.set_label(label, fontsize=11)
    bar.ax.tick_params(labelsize=11)


def save(figure: Figure, path: str | os.PathLike[str], dpi: int = 80) -> Path:
    """Writes a figure, as PNG if the name has no suffix, and creates its folder."""
    path = Path(path) if Path(path).suffix else Path(f'{path}.png')
    with replacing(path) as partial:
        figure.savefig(partial, dpi=dpi, format=path.suffix[1:])
    return path
