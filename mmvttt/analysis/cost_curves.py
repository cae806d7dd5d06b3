"""Curves of cost against image size: slopes, crossings, pictures (vision-ttt Fig. 6)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path

from .benchmark import COMPUTED, Measurement

PANELS = {
    'gflops': 'GFLOPs (multiply-accumulates)',
    'peak_mib': 'peak memory, MiB',
    'latency_ms': 'ms / batch',
    'images_per_s': 'images / s',
}
_UNITS = {'gflops': 'FLOPs', 'peak_mib': 'memory', 'latency_ms': 'latency'}


def lines_of(rows: Sequence[Measurement], field: str) -> dict[str, list[tuple[float, float]]]:
    """Points (side in pixels, value) of each line, by its label; the side is √(height·width)."""
    several = {
        name: len({getattr(r, name) for r in rows}) > 1 for name in ('mode', 'batch', 'dtype')
    }
    models = {row.line: {r.model for r in rows if r.line == row.line} for row in rows}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = getattr(row, field)
        parts = [str(getattr(row, name)) for name, differs in several.items() if differs]
        if value is not None and value > 0:
            line = row.line if len(models[row.line]) == 1 else row.whole_line
            points = lines.setdefault(', '.join([line, *parts]), [])
            points.append(((row.height * row.width) ** 0.5, value))
    return {name: sorted(points) for name, points in lines.items()}


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Log-log slope of the last two points against the tokens: 1 is linear, 2 quadratic."""
    if len(points) < 2 or points[-2][0] == points[-1][0]:
        return None
    (x0, y0), (x1, y1) = points[-2:]
    return math.log(y1 / y0) / (2 * math.log(x1 / x0))


def crossings(rows: Sequence[Measurement], field: str) -> list[tuple[str, str, float]]:
    """Crossings of lines, as (line, line that it falls below, side in pixels), by side.

    Interpolated between the sizes that both have, exactly for costs that are polynomials of second
    degree in the tokens: the difference over the tokens is a straight line.
    """
    crossed = []
    lines = {name: dict(points) for name, points in lines_of(rows, field).items()}
    for a, b in permutations(lines, 2):
        sides = sorted(set(lines[a]) & set(lines[b]))
        tokens = [side**2 for side in sides]
        gaps = [(lines[a][s] - lines[b][s]) / s**2 for s in sides]
        for (t0, t1), (g0, g1) in zip(pairwise(tokens), pairwise(gaps), strict=True):
            if g0 >= 0 > g1:
                crossed.append((a, b, (t0 + (t1 - t0) * g0 / (g0 - g1)) ** 0.5))
    return sorted(crossed, key=lambda crossing: crossing[2])


def describe_crossings(rows: Sequence[Measurement]) -> list[str]:
    """A sentence for each crossing."""
    return [
        f'{_UNITS[field]}: {a} needs less than {b} from {side:.0f}×{side:.0f} pixels on '
        f'({(side / 16) ** 2:.0f} squares of 16×16)'
        for field in _UNITS
        for a, b, side in crossings(rows, field)
    ]


def plot(
    tables: Sequence[Sequence[Measurement]],
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
) -> Path:
    """Draws a row of panels for each table, with its columns against the side of the image.

    Both axes are logarithmic; the legend has each line's slope against the tokens, dotted lines
    are the papers' formulas, and the upper axis is the area in squares of 16×16 pixels, whatever
    the patches of a model.

    Args:
        tables: Rows that share their axes.
        path: The image file to write; its folder is made.
        names: Titles of the tables.
    """
    # Not at the top: matplotlib is an extra, and measuring needs none.
    from .pictures import styled

    return styled(_plot)(tables, path, names)


def _plot(
    tables: Sequence[Sequence[Measurement]],
    path: str | os.PathLike[str],
    names: Sequence[str] | None,
) -> Path:
    from .pictures import beside_panel, panels, save

    every = [row for rows in tables for row in rows]
    chosen = [name for name in PANELS if any(getattr(row, name) is not None for row in every)]
    figure, axes = panels(len(tables), len(chosen), (6.0, 5.2), _headline(every))
    for i, rows in enumerate(tables):
        sides = sorted({(r.height * r.width) ** 0.5 for r in rows})
        for panel, field in zip(axes[i * len(chosen) :], chosen, strict=False):
            formulas = lines_of(rows, 'formula_gflops') if field == 'gflops' else {}
            for name, points in lines_of(rows, field).items():
                steep = slope(points)
                label = name if steep is None else f'{name}: {steep:.2f}'
                (line,) = panel.plot(
                    *zip(*points, strict=True),
                    '--' if 'materialised' in name else '-',
                    marker='o',
                    label=label,
                )
                if name in formulas:
                    panel.plot(*zip(*formulas[name], strict=True), ':', color=line.get_color(),
                               linewidth=3, alpha=0.6)  # fmt: skip
            panel.set(xscale='log', yscale='log', xlabel='side of the image, pixels',
                      ylabel=PANELS[field])  # fmt: skip
            panel.set_xticks(sides, [f'{side:.0f}' for side in sides], rotation=45)
            # The cost axis keeps them: below a decade they have the only labels.
            panel.xaxis.minorticks_off()
            panel.tick_params(labelsize=11)
            panel.grid(visible=True)
            if panel.lines:
                title = 'slope against the patches' if len(sides) > 1 else None
                beside_panel(panel, title=title, fontsize=10, title_fontsize=10)
            top = panel.secondary_xaxis('top')
            top.set_xticks(sides, [f'{(side / 16) ** 2:,.0f}' for side in sides], rotation=45)
            top.minorticks_off()
            top.tick_params(labelsize=11)
            top.set_xlabel('area in squares of 16×16 pixels')
            if names and field == chosen[0]:
                panel.set_title(names[i], fontweight='bold', loc='left', pad=12)
    return save(figure, path)


def _headline(rows: Sequence[Measurement]) -> str:
    """Machine and versions of the rows, as far as they agree."""
    first = rows[0]
    parts = {
        'device': 'by computation' if first.device == COMPUTED else first.device,
        'mode': first.mode,
        'batch': f'batch {first.batch}',
        'dtype': first.dtype,
        'torch': f'torch {first.torch.partition("+")[0]}',
    }
    agreed = (len({getattr(r, name) for r in rows}) == 1 for name in parts)
    return ', '.join(text for text, same in zip(parts.values(), agreed, strict=True) if same)
