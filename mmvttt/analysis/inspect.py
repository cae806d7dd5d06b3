"""The diagnostics of tools/inspect_model.py: pictures and a CSV each, from a model and images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import UsageError
from .attention import attention_distance, implicit_attention, key_shift, softmax_weights
from .inner_training import largest_tokens
from .look import Look, means, spread
from .mixers import SOFTMAX, Mixing
from .pictures import (
    beside_panel,
    block_title,
    colour_bar,
    cut_middle,
    image_panels,
    panels,
    root_scale,
    show_image,
    show_map,
    styled,
)
from .receptive_field import SHARES, receptive_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger(__name__)
# Brightness of the patches outside the 30 % with the largest gradients.
_DIMMED = 0.15
_DIRECTIONS = {'f': 'forward scan', 'b': 'backward scan'}


def inspect_model(look: Look, what: Iterable[str]) -> list[Path]:
    """Runs diagnostics by name (`DIAGNOSTICS`) and returns the files that they wrote.

    A diagnostic that has nothing to look at in this model is logged as a warning where another one
    has.
    """
    files, refused = [], {}
    for name in what:
        try:
            files += DIAGNOSTICS[name](look)
        except UsageError as error:
            refused[name] = error
    if not files:
        raise next(iter(refused.values()))
    for name, why in refused.items():
        _log.warning('%s left out: %s', name, why)
    return files


@styled
def draw_fields(look: Look) -> list[Path]:
    """erf: receptive fields of the last map and the FPN's levels, 4th root; sides of squares."""
    fields = receptive_fields(look.model, torch.stack([image for _, image in look.images]))
    figure, axes = image_panels(
        len(fields) + 1, 3, look.size, f'Receptive field of the centre cell, {look.counted}'
    )
    show_image(axes[0], look.images[0][0], 'first image')
    rows = []
    for panel, (name, field) in zip(axes[1:], fields.items(), strict=True):
        sides = field.sides()
        title = f'{name}, {field.map_size[0]}×{field.map_size[1]} cells'
        drawn = show_map(panel, field.field**0.25, look.size, title)
        row, column = field.middle
        for side in sides:
            down, right = (np.array([-1, -1, 1, 1, -1]), np.array([-1, 1, 1, -1, -1]))
            panel.plot(column + right * side / 2, row + down * side / 2, 'w', lw=1)
        panel.set(xlim=(0, look.size[1]), ylim=(look.size[0], 0))
        rows.append((name, *sides))
    label = '4th root of |gradient| / maximum\nwhite: 20, 50, 99 % of the gradient'
    colour_bar(figure, drawn, axes, label)
    columns = ('map', *(f'side_{share:.0%}'.rstrip('%') for share in SHARES))
    return [look.save(figure, 'erf'), look.table('erf', columns, rows)]


@styled
def draw_gradients(look: Look) -> list[Path]:
    """gmm: gradient magnitude maps (vision-ttt Eq. 6) and the 30 % of the largest tokens."""
    files, rows = [], []
    for path, (picture, _), layers in zip(look.files, look.images, look.trainings, strict=True):
        chosen = spread(layers)
        figure, axes = image_panels(
            2 * len(chosen) + 2, len(chosen) + 1, look.size, 'Inner gradient of each patch'
        )
        show_image(axes[0], picture, cut_middle(path.name))
        blank = axes[len(chosen) + 1]
        text = 'the 30 % of the patches\nwith the largest gradient'
        blank.text(0.5, 0.5, text, ha='center', va='center', transform=blank.transAxes)
        for panel, masked, layer in zip(axes[1:], axes[len(chosen) + 2 :], chosen, strict=False):
            magnitude = layer.magnitude[0].float()
            values = (magnitude / magnitude.max()).unflatten(0, layer.hw)
            title = f'{block_title(layer.name)}\nmax {magnitude.max():.3g}'
            drawn = show_map(panel, values, look.size, title)
            mask = largest_tokens(magnitude).unflatten(0, layer.hw)[None, None].float()
            show_image(masked, picture * F.interpolate(mask, look.size)[0].clamp(min=_DIMMED))
        colour_bar(figure, drawn, axes[: len(chosen) + 1], 'gradient /\nmaximum')
        files.append(look.save(figure, f'gmm_{look.names[path]}'))
        rows += [(layer.name, layer.variation[0].item()) for layer in layers]
    return [*files, look.table('gmm', ('layer', 'variation'), means(rows))]


@styled
def draw_losses(look: Look) -> list[Path]:
    """loss: Vittt's reconstruction loss along the tokens (Fig. 11), or before and after a step."""
    first = look.trainings[0]
    scans = [layer for layer in first if layer.scan is not None]
    rows = _scalars(look, ('loss_first', 'loss_last'))
    title = f'Inner loss, mean over heads, {look.counted}'
    if scans:
        columns = min(4, len(scans))
        figure, axes = panels(
            -(-len(scans) // columns), columns, (3.4, 2.8), title, sharex=True, sharey=True
        )
        for panel in axes[len(scans) :]:
            panel.axis('off')
        for i, (panel, layer) in enumerate(zip(axes, scans, strict=False)):
            curves = [
                next(x for x in layers if x.name == layer.name).scan.loss.mean((0, 3))
                for layers in look.trainings
            ]
            mean = torch.stack(curves).mean(0)
            for r, direction in enumerate(layer.scan.directions):
                smooth = mean[:, r].float()
                panel.plot(range(1, len(smooth) + 1), smooth.tolist(), color=f'C{r}', lw=1.2,
                           label=_DIRECTIONS[direction] if i == 0 else None)  # fmt: skip
            panel.set_title(block_title(layer.name))
            panel.grid(visible=True)
            if i % columns == 0:
                panel.set_ylabel('‖f(k) − v‖')
            if i >= len(scans) - columns:
                panel.set_xlabel('token, as it is read')
        axes[0].set_ylim(bottom=0)
        figure.legend(loc='outside lower center', ncols=2)
    else:
        figure, (panel,) = panels(1, 1, (8, 4.2), title)
        places = np.arange(len(rows))
        for shift, column, label in ((-0.2, 1, 'before the step'), (0.2, 2, 'after the step')):
            panel.bar(places + shift, [row[column] for row in rows], 0.4, label=label)
        panel.set_xticks(places, [block_title(row[0]) for row in rows], rotation=45, ha='right')
        panel.set_ylabel('inner loss')
        panel.axhline(0, color='black', lw=0.8)
        panel.grid(visible=True, axis='y')
        beside_panel(panel)
    table = look.table('loss', ('layer', 'first', 'last'), rows)
    return [look.save(figure, 'loss'), table]


@styled
def draw_states(look: Look) -> list[Path]:
    """state: drift, effective rank and learning rate by layer."""
    names = ('drift', 'rank', 'rate')
    labels = (
        'drift ‖W − W₀‖ / ‖W₀‖',
        'effective rank of W − W₀',
        'learning rate used' if look.trainings[0][0].scan else '‖W − W₀‖ / ‖gradient‖',
    )
    rows = _scalars(look, names)
    figure, axes = panels(1, 3, (4.2, 3.8), f'Inner states, mean over heads, {look.counted}')
    for panel, label, values in zip(axes, labels, list(zip(*rows, strict=True))[1:], strict=True):
        panel.plot(range(1, len(values) + 1), values, marker='o')
        panel.set(title=label, ylim=(0, 1.1 * max(values)))
        _by_layer(panel)
    return [look.save(figure, 'state'), look.table('state', ('layer', *names), rows)]


@styled
def draw_attention(look: Look) -> list[Path]:
    """attention: implicit attention (t5 Eq. 13) of chosen patches; mean attention distance."""
    files, rows = [], []
    blind = [m.name for m in look.mixings[0] if m.keys is None]
    if len(blind) == len(look.mixings[0]):
        raise UsageError(
            f'the values of no mixer of {type(look.model).__name__} can be seen: implicit '
            'attention needs an op of ttt_kernels, an InnerTraining or the attention of timm'
        )
    for name in blind:
        print(f'{name}: its values cannot be seen, no implicit attention')
    for path, (picture, _), mixings in zip(look.files, look.images, look.mixings, strict=True):
        seen = [m for m in mixings if m.name not in blind]
        chosen = spread(seen)
        columns = len(chosen) + 1
        figure, axes = image_panels(
            columns * len(look.queries),
            columns,
            look.size,
            'Implicit attention ‖∂o/∂v‖ of the marked patch, mean over heads',
        )
        for i, query in enumerate(look.queries):
            panels_ = axes[i * columns : (i + 1) * columns]
            show_image(panels_[0], picture, cut_middle(path.name) if i == 0 else None)
            for panel, mixing in zip(panels_[1:], chosen, strict=True):
                (row,) = implicit_attention(mixing, [_patch_at(query, mixing.hw)]).mean(0)
                values = root_scale(row.float()).unflatten(0, mixing.hw)
                drawn = show_map(
                    panel, values, look.size, block_title(mixing.label) if i == 0 else None
                )
            for panel, hw in zip(panels_, [chosen[0].hw, *(m.hw for m in chosen)], strict=True):
                row, column = divmod(_patch_at(query, hw), hw[1])
                middle = (column + 0.5) / hw[1] * look.size[1], (row + 0.5) / hw[0] * look.size[0]
                panel.plot(*middle, 'x', color='#ff3030', markersize=10, markeredgewidth=2.5)
        label = '√(attention / maximum,\nat least 4 means)'
        colour_bar(figure, drawn, axes, label)
        files.append(look.save(figure, f'attention_{look.names[path]}'))
        rows += [(m.label, *_distance(m)) for m in seen]
    table = look.table('attention', ('layer', 'distance', 'queries'), means(rows))
    return [*files, table]


@styled
def draw_keys(look: Look) -> list[Path]:
    """keys: key shift by layer (t5 Eq. 11), next to the shift of independent keys."""
    rows = [
        (mixing.label, key_shift(mixing.keys).mean().item(), len(mixing.patches) ** -0.5)
        for mixings in look.mixings
        for mixing in mixings
        if mixing.keys is not None
    ]
    if not rows:
        raise UsageError(
            f'the keys of no mixer of {type(look.model).__name__} can be seen: key shift needs an '
            'op of ttt_kernels, an InnerTraining or the attention of timm'
        )
    by_layer = means(rows)
    figure, (panel,) = panels(1, 1, (7, 4), f'Key shift, {look.counted}')
    layers = range(1, len(by_layer) + 1)
    panel.plot(layers, [row[1] for row in by_layer], marker='o', label='this model')
    panel.plot(
        layers, [row[2] for row in by_layer], '--', color='grey', label='independent keys, 1/√N'
    )
    panel.set(ylabel='‖mean of keys‖ / mean of ‖key‖', ylim=(0, None))
    _by_layer(panel)
    beside_panel(panel)
    columns = ('layer', 'key_shift', 'independent')
    return [look.save(figure, 'keys'), look.table('keys', columns, by_layer)]


DIAGNOSTICS: dict[str, Callable[[Look], list[Path]]] = {
    'erf': draw_fields,
    'gmm': draw_gradients,
    'loss': draw_losses,
    'state': draw_states,
    'attention': draw_attention,
    'keys': draw_keys,
}


def _scalars(look: Look, names: Sequence[str]) -> list[tuple]:
    """Rows of `LayerTraining.scalars` of each layer, means over the images."""
    layers = (layer for layers in look.trainings for layer in layers)
    return means([(layer.name, *(layer.scalars()[n] for n in names)) for layer in layers])


def _by_layer(panel: Axes) -> None:
    panel.set_xlabel('layer')
    panel.locator_params(axis='x', integer=True)
    panel.grid(visible=True)


def _patch_at(query: tuple[float, float], hw: tuple[int, int]) -> int:
    """The patch, row by row, at (row, column) in [0, 1]."""
    row, column = (min(int(p * n), n - 1) for p, n in zip(query, hw, strict=True))
    return row * hw[1] + column


def _distance(mixing: Mixing) -> tuple[float, int]:
    """Mean attention distance in patches, of all queries of a softmax, else of nine."""
    if isinstance(mixing.mixer, SOFTMAX):
        weights = softmax_weights(mixing)[:, :, mixing.patches][..., mixing.patches]
        return attention_distance(weights, mixing.hw).mean().item(), weights.shape[2]
    thirds = (1 / 6, 1 / 2, 5 / 6)
    places = sorted({_patch_at((y, x), mixing.hw) for y in thirds for x in thirds})
    weights = implicit_attention(mixing, places)
    return attention_distance(weights, mixing.hw, places).nanmean().item(), len(places)
