"""The diagnostics of tools/inspect_model.py: pictures and a CSV each, from a model and images."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DataError, UsageError
from .attention import attention_distance, implicit_attention, key_shift, softmax_weights
from .class_activation import class_activation
from .inner_training import LayerTraining, largest_tokens, mask_scores, training_of
from .mixers import SOFTMAX, Mixing, record_mixers
from .models import backbone_of
from .pictures import (
    LINES,
    colour_bar,
    image_panels,
    panels,
    read_image,
    save,
    show_image,
    show_map,
    styled,
)
from .receptive_field import SHARES, feature_maps, last_map, receptive_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Layers that a picture has room for; the tables have all.
_DRAWN = 6
# Brightness of the patches that are not among the 30 % of the largest gradients.
_DIMMED = 0.15
_DIRECTIONS = {'f': 'forward scan', 'b': 'backward scan'}


@dataclass(frozen=True)
class Look:
    """A model, images, and where the results go.

    Attributes:
        model: In any mode; runs in evaluation mode.
        files: The images.
        size: (height, width) to which they are resized.
        out: Folder of the pictures and tables.
        queries: Places (row, column) in [0, 1] whose implicit attention is drawn.
        annotations: COCO file with the objects' masks, or None.
    """

    model: nn.Module
    files: Sequence[Path]
    size: tuple[int, int]
    out: Path
    queries: Sequence[tuple[float, float]] = ((0.5, 0.5),)
    annotations: Path | None = None

    @cached_property
    def images(self) -> list[tuple[Tensor, Tensor]]:
        """Each image for the eye and for the model, `(3, H, W)`."""
        own = getattr(self.model, 'data_preprocessor', None)
        statistics = ()
        if getattr(own, 'mean', None) is not None:
            statistics = [(x.flatten() / 255).tolist() for x in (own.mean, own.std)]
        return [read_image(path, self.size, *statistics) for path in self.files]

    @cached_property
    def mixings(self) -> list[list[Mixing]]:
        """The mixers on each image, as their backbone runs."""
        backbone = backbone_of(self.model)
        return [record_mixers(backbone, image[None]) for _, image in self.images]

    @cached_property
    def trainings(self) -> list[list[LayerTraining]]:
        """The inner training of each image's mixers; those without one are reported once."""
        found = [[training_of(mixing) for mixing in mixings] for mixings in self.mixings]
        for mixing, layer in zip(self.mixings[0], found[0], strict=True):
            if layer is None:
                print(
                    f'{mixing.name} ({type(mixing.mixer).__name__}): no inner training that can be '
                    'seen; it calls no op of ttt_kernels that trains, and is no InnerTraining with '
                    'an inner model'
                )
        if not any(found[0]):
            raise UsageError(
                f'no mixer of {type(self.model).__name__} trains anything at test time: '
                '--what erf attention keys work without an inner training'
            )
        return [[layer for layer in layers if layer is not None] for layers in found]

    def coverage(self, path: Path, hw: tuple[int, int]) -> Tensor | None:
        """Part of each patch inside the masks of an image `(h·w,)`; None without annotations.

        Raises:
            DataError: The annotations do not have the image.
        """
        if self.annotations is None:
            return None
        images = self._coco.imgs.values()
        info = next((i for i in images if Path(i['file_name']).name == path.name), None)
        if info is None:
            raise DataError(f'{str(self.annotations)!r} has no image {path.name!r}')
        mask = np.zeros((info['height'], info['width']), np.float32)
        for annotation in self._coco.imgToAnns[info['id']]:
            mask = np.maximum(mask, self._coco.annToMask(annotation))
        mask = cv2.resize(mask, self.size[::-1], interpolation=cv2.INTER_AREA)
        return F.adaptive_avg_pool2d(torch.from_numpy(mask)[None, None], hw).flatten()

    @cached_property
    def _coco(self) -> Any:
        from contextlib import redirect_stdout
        from io import StringIO

        from pycocotools.coco import COCO

        try:
            with redirect_stdout(StringIO()):
                return COCO(str(self.annotations))
        except (OSError, json.JSONDecodeError, KeyError, AssertionError) as error:
            raise DataError(
                f'{str(self.annotations)!r} is no COCO annotation file: {error}'
            ) from error


def inspect_model(look: Look, what: Iterable[str]) -> list[Path]:
    """Runs diagnostics by name (`DIAGNOSTICS`) and returns the files that they wrote.

    Raises:
        UsageError: A diagnostic does not exist, or the model has nothing that it looks at.
    """
    names = list(what)
    unknown = [name for name in names if name not in DIAGNOSTICS]
    if unknown:
        raise UsageError(
            f'there is no diagnostic {unknown[0]!r}: choose of {", ".join(DIAGNOSTICS)}'
        )
    return [path for name in names for path in DIAGNOSTICS[name](look)]


@styled
def draw_fields(look: Look) -> list[Path]:
    """erf: receptive fields of the last map and the FPN's levels, 4th root; sides of squares."""
    found = receptive_fields(look.model, torch.stack([image for _, image in look.images]))
    figure, axes = image_panels(
        len(found) + 1, 3, look.size, f'Receptive field of the centre cell, {_images(look)}'
    )
    show_image(axes[0], look.images[0][0], 'first image')
    rows = []
    for panel, (name, field) in zip(axes[1:], found.items(), strict=True):
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
    return [save(figure, look.out / 'erf.png'), _table(look.out / 'erf.csv', columns, rows)]


@styled
def draw_gradients(look: Look) -> list[Path]:
    """gmm: gradient magnitude maps (vision-ttt Eq. 6) and the 30 % of the largest tokens."""
    files, scores = [], []
    for path, (picture, _), layers in zip(look.files, look.images, look.trainings, strict=True):
        chosen = _spread(layers)
        figure, axes = image_panels(
            2 * len(chosen) + 2, len(chosen) + 1, look.size, 'Inner gradient of each patch'
        )
        show_image(axes[0], picture, path.name)
        blank = axes[len(chosen) + 1]
        text = 'the 30 % of the patches\nwith the largest gradient'
        blank.text(0.5, 0.5, text, ha='center', va='center', transform=blank.transAxes)
        for panel, kept, layer in zip(axes[1:], axes[len(chosen) + 2 :], chosen, strict=False):
            magnitude = layer.magnitude[0].float()
            values = (magnitude / magnitude.max()).unflatten(0, layer.hw)
            title = f'{layer.name}\nmax {magnitude.max():.2g}'
            drawn = show_map(panel, values, look.size, title)
            mask = largest_tokens(magnitude).unflatten(0, layer.hw)[None, None].float()
            show_image(kept, picture * F.interpolate(mask, look.size)[0].clamp(min=_DIMMED))
        colour_bar(figure, drawn, axes[: len(chosen) + 1], 'gradient /\nmaximum')
        files.append(save(figure, look.out / f'gmm_{path.stem}.png'))
        for layer in layers:
            found = (layer.variation[0].item(),)
            coverage = look.coverage(path, layer.hw)
            if coverage is not None:
                found += mask_scores(layer.magnitude[0], coverage)
            scores.append((layer.name, *found))
    columns = ('layer', 'variation', 'mask_ratio', 'mask_auc')[: len(scores[0])]
    return [*files, _table(look.out / 'gmm.csv', columns, _means(scores))]


@styled
def draw_losses(look: Look) -> list[Path]:
    """loss: Vittt's reconstruction loss along the tokens (Fig. 11), or before and after a step."""
    first = look.trainings[0]
    scans = [layer for layer in first if layer.scan is not None]
    means = _scalars(look, ('loss_first', 'loss_last'))
    title = f'Inner loss, mean over heads, {_images(look)}'
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
            panel.set_title(layer.name)
            panel.grid(visible=True)
            if i % columns == 0:
                panel.set_ylabel('‖f(k) − v‖')
            if i >= len(scans) - columns:
                panel.set_xlabel('token, as it is read')
        axes[0].set_ylim(bottom=0)
        figure.legend(loc='outside lower center', ncols=2)
    else:
        figure, (panel,) = panels(1, 1, (8, 4.2), title)
        places = np.arange(len(means))
        for shift, column, label in ((-0.2, 1, 'before the step'), (0.2, 2, 'after the step')):
            panel.bar(places + shift, [row[column] for row in means], 0.4, label=label)
        panel.set_xticks(places, [row[0] for row in means], rotation=45, ha='right')
        panel.set_ylabel('inner loss')
        panel.axhline(0, color='black', lw=0.8)
        panel.grid(visible=True, axis='y')
        panel.legend()
    table = _table(look.out / 'loss.csv', ('layer', 'first', 'last'), means)
    return [save(figure, look.out / 'loss.png'), table]


@styled
def draw_states(look: Look) -> list[Path]:
    """state: drift, effective rank and learning rate by layer; where in the image it moves."""
    names = ('drift', 'rank', 'rate')
    labels = (
        'drift ‖W − W₀‖ / ‖W₀‖',
        'effective rank of W − W₀',
        'learning rate used' if look.trainings[0][0].scan else '‖W − W₀‖ / ‖gradient‖',
    )
    means = _scalars(look, names)
    figure, axes = panels(1, 3, (4.2, 3.8), f'Inner states, mean over heads, {_images(look)}')
    for panel, label, values in zip(axes, labels, list(zip(*means, strict=True))[1:], strict=True):
        panel.plot(range(1, len(values) + 1), values, marker='o')
        panel.set(title=label, ylim=(0, 1.1 * max(values)))
        _by_layer(panel)
    files = [save(figure, look.out / 'state.png')]
    for path, (picture, _), layers in zip(look.files, look.images, look.trainings, strict=True):
        chosen = _spread(layers)
        moving = chosen[0].scan is not None
        title = 'Agreement of each patch with the step, cos(gradient of the patch, their sum)'
        if moving:
            title = 'How far the state moves while it reads each mini-batch'
        figure, axes = image_panels(len(chosen) + 1, len(chosen) + 1, look.size, title)
        show_image(axes[0], picture, path.name)
        for panel, layer in zip(axes[1:], chosen, strict=True):
            values = (_moves(layer) if layer.scan else _agreement(layer)).float()
            if layer.scan:
                values = values / values.max()
            drawn = show_map(
                panel, values.clamp_min(0).unflatten(0, layer.hw), look.size, layer.name
            )
        label = '‖Wₙ − Wₙ₋₁‖ /\nmaximum' if moving else 'cosine,\nbelow 0 as 0'
        colour_bar(figure, drawn, axes, label)
        files.append(save(figure, look.out / f'state_{path.stem}.png'))
    return [*files, _table(look.out / 'state.csv', ('layer', *names), means)]


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
        chosen = _spread(seen)
        columns = len(chosen) + 1
        figure, axes = image_panels(
            columns * len(look.queries),
            columns,
            look.size,
            'Implicit attention ‖∂o/∂v‖ of the marked patch, mean over heads',
        )
        for i, query in enumerate(look.queries):
            panels_ = axes[i * columns : (i + 1) * columns]
            show_image(panels_[0], picture, path.name if i == 0 else None)
            for panel, mixing in zip(panels_[1:], chosen, strict=True):
                (row,) = implicit_attention(mixing, [_place(query, mixing.hw)]).mean(0)
                values = row.float()
                values = (values / values.max()).unflatten(0, mixing.hw).sqrt()
                drawn = show_map(panel, values, look.size, mixing.label if i == 0 else None)
            for panel, hw in zip(panels_, [chosen[0].hw, *(m.hw for m in chosen)], strict=True):
                row, column = divmod(_place(query, hw), hw[1])
                middle = (column + 0.5) / hw[1] * look.size[1], (row + 0.5) / hw[0] * look.size[0]
                panel.plot(*middle, 'x', color='#ff3030', markersize=10, markeredgewidth=2.5)
        label = '√(attention /\nmaximum)'
        colour_bar(figure, drawn, axes, label)
        files.append(save(figure, look.out / f'attention_{path.stem}.png'))
        rows += [(m.label, *_distance(m)) for m in seen]
    table = _table(look.out / 'attention.csv', ('layer', 'distance', 'queries'), _means(rows))
    return [*files, table]


@styled
def draw_keys(look: Look) -> list[Path]:
    """keys: key shift by layer (t5 Eq. 11), beside that of independent keys."""
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
    means = _means(rows)
    figure, (panel,) = panels(1, 1, (7, 4), f'Key shift, {_images(look)}')
    layers = range(1, len(means) + 1)
    panel.plot(layers, [row[1] for row in means], marker='o', label='this model')
    panel.plot(
        layers, [row[2] for row in means], '--', color='grey', label='independent keys, 1/√N'
    )
    panel.set(ylabel='‖mean of keys‖ / mean of ‖key‖', ylim=(0, None))
    _by_layer(panel)
    panel.legend()
    columns = ('layer', 'key_shift', 'independent')
    return [save(figure, look.out / 'keys.png'), _table(look.out / 'keys.csv', columns, means)]


@styled
def draw_features(look: Look) -> list[Path]:
    """features: three principal components of the last map and of the FPN's levels, as colours."""
    files, rows = [], []
    for path, (picture, image) in zip(look.files, look.images, strict=True):
        with torch.no_grad():
            maps = feature_maps(look.model.eval(), image[None])
        figure, axes = image_panels(len(maps) + 1, 3, look.size, 'Principal components')
        show_image(axes[0], picture, path.name)
        for panel, (name, (found,)) in zip(axes[1:], maps.items(), strict=True):
            cells = found.flatten(1).mT.double()
            cells = cells - cells.mean(0)
            variances, directions = torch.linalg.eigh(cells.mT @ cells)
            directions = directions[:, -3:].flip(1)
            # An eigenvector has no sign: its largest entry is positive.
            signs = directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
            colours = cells @ (directions * signs)
            colours = colours - colours.amin(0)
            colours /= colours.amax(0).clamp_min(torch.finfo(colours.dtype).tiny)
            drawn = colours.mT.unflatten(1, found.shape[1:])[None]
            show_image(panel, F.interpolate(drawn, look.size)[0], name)
            rows.append((name, (variances[-3:].sum() / variances.sum()).item()))
        files.append(save(figure, look.out / f'features_{path.stem}.png'))
    columns = ('map', 'share_of_variance')
    return [*files, _table(look.out / 'features.csv', columns, _means(rows))]


@styled
def draw_activation(look: Look) -> list[Path]:
    """cam: Grad-CAM of a classifier's first class, or of all that a detector detects."""
    files, rows = [], []
    model = look.model.eval()
    for path, (picture, image), mixings in zip(look.files, look.images, look.mixings, strict=True):
        maps = class_activation(model, image[None], _spread(mixings))
        figure, axes = image_panels(len(maps) + 1, 3, look.size, 'Class activation (Grad-CAM)')
        show_image(axes[0], picture, path.name)
        for panel, (name, values) in zip(axes[1:], maps.items(), strict=True):
            largest = values.max()
            share = values / largest.clamp_min(torch.finfo(values.dtype).tiny)
            drawn = show_map(panel, share, look.size, f'{name}, max {largest:.2g}')
            rows.append((name, values.mean().item(), largest.item()))
        colour_bar(figure, drawn, axes, 'activation / maximum')
        files.append(save(figure, look.out / f'cam_{path.stem}.png'))
    return [*files, _table(look.out / 'cam.csv', ('map', 'mean', 'largest'), _means(rows))]


@styled
def draw_neighbours(look: Look) -> list[Path]:
    """tsne: images in the plane by their pooled features, coloured by the folder they are in."""
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError:
        raise UsageError('--what tsne needs scikit-learn: pip install scikit-learn') from None
    names = [path.parent.name for path in look.files]
    if len(names) < 4:
        raise UsageError('--what tsne needs several images, in a folder for each class')
    with torch.no_grad():
        model = look.model.eval()
        found = [last_map(model, image[None]).mean((2, 3)) for _, image in look.images]
    features = torch.cat(found).float()
    method = TSNE(perplexity=min(30, (len(names) - 1) / 3), init='pca', random_state=0)
    places = method.fit_transform(features.numpy())
    figure, (panel,) = panels(1, 1, (8, 6), f't-SNE of the last map, {len(names)} images')
    panel.set(xticks=[], yticks=[])
    nearest = torch.cdist(features, features).fill_diagonal_(torch.inf).argmin(1)
    rows = []
    for i, name in enumerate(sorted(set(names))):
        own = [k for k, other in enumerate(names) if other == name]
        look_like = dict(color=LINES[i % len(LINES)], marker='os^D*'[i // len(LINES) % 5])
        panel.scatter(places[own, 0], places[own, 1], s=30, label=name, **look_like)
        rows.append((name, len(own), sum(names[nearest[k]] == name for k in own) / len(own)))
    figure.legend(loc='outside right center')
    columns = ('class', 'images', 'nearest_is_of_the_class')
    return [save(figure, look.out / 'tsne.png'), _table(look.out / 'tsne.csv', columns, rows)]


DIAGNOSTICS: dict[str, Callable[[Look], list[Path]]] = {
    'erf': draw_fields,
    'gmm': draw_gradients,
    'loss': draw_losses,
    'state': draw_states,
    'attention': draw_attention,
    'keys': draw_keys,
    'features': draw_features,
    'cam': draw_activation,
    'tsne': draw_neighbours,
}
# The others need a head or images of several classes.
DEFAULT = tuple(DIAGNOSTICS)[:-2]


def _images(look: Look) -> str:
    count = len(look.files)
    return f'mean over {count} images' if count > 1 else 'one image'


def _scalars(look: Look, names: Sequence[str]) -> list[tuple]:
    """Rows of `LayerTraining.scalars` of each layer, means over the images."""
    layers = (layer for layers in look.trainings for layer in layers)
    return _means([(layer.name, *(layer.scalars()[n] for n in names)) for layer in layers])


def _by_layer(panel: Axes) -> None:
    panel.set_xlabel('layer')
    panel.locator_params(axis='x', integer=True)
    panel.grid(visible=True)


def _spread(layers: Sequence) -> list:
    """Layers evenly spread from the first to the last, as many as a picture has room for."""
    count = min(_DRAWN, len(layers))
    return [layers[round(i * (len(layers) - 1) / max(count - 1, 1))] for i in range(count)]


def _moves(layer: LayerTraining) -> Tensor:
    """Steps of the state at the patches of each mini-batch `(h·w,)`, mean over heads and scans."""
    scan = layer.scan
    count = scan.loss.shape[1]
    total = torch.zeros(count)
    for r, direction in enumerate(scan.directions):
        moves = scan.step[0, :, r].mean(-1).float().cpu()
        along = moves.repeat_interleave(scan.mini_batch_size)[:count]
        total += along.flip(0) if direction == 'b' else along
    return total[layer.patches.cpu()] / len(scan.directions)


def _agreement(layer: LayerTraining) -> Tensor:
    return torch.cat([s.agreement[0] for s in layer.steps], -1).mean(-1)[layer.patches]


def _place(query: tuple[float, float], hw: tuple[int, int]) -> int:
    """The patch, row by row, at a place (row, column) in [0, 1]."""
    row, column = (min(int(p * n), n - 1) for p, n in zip(query, hw, strict=True))
    return row * hw[1] + column


def _distance(mixing: Mixing) -> tuple[float, int]:
    """Mean attention distance in patches, of all queries of a softmax, else of nine."""
    if isinstance(mixing.mixer, SOFTMAX):
        found = softmax_weights(mixing)[:, :, mixing.patches][..., mixing.patches]
        return attention_distance(found, mixing.hw).mean().item(), found.shape[2]
    thirds = (1 / 6, 1 / 2, 5 / 6)
    places = sorted({_place((y, x), mixing.hw) for y in thirds for x in thirds})
    found = implicit_attention(mixing, places)
    return attention_distance(found, mixing.hw, places).nanmean().item(), len(places)


def _means(rows: Sequence[tuple]) -> list[tuple]:
    """Means over the images of rows that begin with the same name."""
    by_name: dict[str, list[tuple]] = {}
    for name, *values in rows:
        by_name.setdefault(name, []).append(tuple(values))
    return [
        (name, *(float(np.nanmean(column)) if np.isfinite(column).any() else float('nan')
                 for column in np.array(values, float).T))
        for name, values in by_name.items()
    ]  # fmt: skip


def _table(path: Path, columns: Sequence[str], rows: Sequence[tuple]) -> Path:
    """Writes a CSV and prints it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [(row[0], *(f'{value:.5g}' for value in row[1:])) for row in rows]
    with path.open('w', newline='') as file:
        csv.writer(file, lineterminator='\n').writerows([columns, *lines])
    for name, *values in lines:
        found = ', '.join(f'{c} {v}' for c, v in zip(columns[1:], values, strict=True))
        print(f'{path.stem}: {name}: {found}')
    return path
