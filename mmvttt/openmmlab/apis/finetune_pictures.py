"""Pictures of a fine-tuning: its data, its curves, its predictions and its confusions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from mmengine.registry import DATASETS
from torchvision.ops import box_iou

from ..config import building
from ..data.images import spread
from ..data.own_folder import OwnFolder
from ..tasks.lettering import font_for
from ..tasks.prediction import Boxes, Classes, LabelMap, Prediction

PICTURES = 'results.png', 'data.png', 'predictions.png', 'confusion.png'
_SHOWN, _CLASSES, _PREDICTED = 8, 30, 200
# Scores from which a box is drawn and counted.
_SCORE = 0.3


@contextmanager
def _page(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of some inches that is written at the end."""
    # Names of classes are no mathematics.
    with rc_context({'font.size': 9, 'text.parse_math': False}):
        figure = Figure((width, height), layout='constrained')
        yield figure
        figure.savefig(path, dpi=80)


def _name(name: str, longest: int = 24) -> tuple[str, FontProperties]:
    """A name as it can be written, cut in its middle if it is long, and a font with its letters."""
    half = longest // 2
    text, font = font_for(name if len(name) <= longest else f'{name[:half]}…{name[-half:]}', 12)
    file = getattr(font, 'path', None)
    return text, FontProperties(fname=file if isinstance(file, str) else None, size=9)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    """A bar for each class, the first above; of many classes the first and the last."""
    if len(names) > _CLASSES:
        half = _CLASSES // 2
        names = [*names[:half], '…', *names[-half:]]
        values = [*values[:half], 0, *values[-half:]]
    axes.barh(range(len(names)), np.nan_to_num(values), color='tab:blue')
    _ticks(axes.yaxis, names)
    axes.invert_yaxis()
    axes.set_title(title)


def _ticks(axis: Any, names: Sequence[str], **options: Any) -> None:
    labels = [_name(name) for name in names]
    axis.set_ticks(range(len(names)), [text for text, _ in labels], **options)
    for tick, (_, font) in zip(axis.get_ticklabels(), labels, strict=True):
        tick.set_fontproperties(font)


def _images(figure: Any, images: Sequence[tuple[str, np.ndarray]], columns: int) -> None:
    """Pictures with a title each, in rows."""
    grid = figure.subplots(-(-len(images) // columns), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (title, image) in zip(grid.flat, images, strict=False):
        axes.imshow(image)
        text, font = _name(title, 40)
        axes.set_title(text, fontproperties=font)


def draw_results(
    history: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    table: Sequence[tuple[str, int, float]],
    path: Path,
) -> None:
    """Loss and measures by step, and the result of each class, the best first."""
    rows = sorted(table, key=lambda row: -np.nan_to_num(row[2]))
    with _page(path, 10, 3 + 0.15 * min(len(rows), _CLASSES)) as figure:
        loss, measures, classes = figure.subplots(1, 3)
        steps = [entry['step'] for entry in history]
        loss.plot(steps, [entry['loss'] for entry in history], '.-', color='tab:red')
        loss.set(title='loss', xlabel='step', ylim=(0, None))
        for key in keys:
            values = [entry['metrics'].get(key, np.nan) for entry in history]
            measures.plot(steps, values, '.-', label=key.rpartition('/')[2])
        measures.set(title='validation', xlabel='step', ylim=(0, None))
        measures.legend()
        _bars(classes, [row[0] for row in rows], [row[2] for row in rows], 'by class')


def draw_data(data: OwnFolder, cfg: Any, path: Path) -> None:
    """Objects by class, size and place; training pictures as the pipeline makes them."""
    with building(cfg):
        samples: Any = DATASETS.build(cfg.train_dataloader.dataset)
    pages = [
        _titled(_labelled(samples[i], data.classes)) for i in spread([*range(len(samples))], _SHOWN)
    ]
    objects = [(o, p.image) for p in data.train for o in p.objects]
    names = [o['category'] for o, _ in objects] or [p.target for p in data.train]
    with _page(path, 11, 8) as figure:
        rows = figure.add_gridspec(2, height_ratios=(1, 1.7))
        above, below = (figure.add_subfigure(rows[i]) for i in range(2))
        if data.task != 'maps':
            charts = above.subplots(1, 3 if objects else 1, squeeze=False)[0]
            counts = sorted(((names.count(c), c) for c in data.classes), reverse=True)
            title = 'objects' if objects else 'pictures'
            _bars(charts[0], [c for _, c in counts], [n for n, _ in counts], f'{title} by class')
        if objects:
            boxes = np.array([o['bbox'] for o, _ in objects], float)
            sizes = np.array([(image['width'], image['height']) for _, image in objects], float)
            sides = np.sqrt(boxes[:, 2:].prod(1))
            charts[1].hist(sides, 30, range=(0, sides.max() + 1))
            charts[1].set(title='root of the area, pixels', ylabel='objects')
            places = ((boxes[:, :2] + boxes[:, 2:] / 2) / sizes).clip(0, 1)
            charts[2].hist2d(*places.T, bins=20, range=((0, 1), (0, 1)))
            charts[2].invert_yaxis()
            charts[2].set(title='centres', xlabel='x / width', ylabel='y / height')
        below.suptitle('training pictures after the pipeline')
        _images(below, pages, 4)


def _labelled(
    sample: Mapping[str, Any], classes: Sequence[str], prediction: Prediction | None = None
) -> Prediction:
    """The labels of a data set's sample, on its picture or on the picture of a prediction."""
    labels = sample['data_samples']
    image, palette = sample['inputs'].numpy()[::-1].transpose(1, 2, 0), None
    if prediction is not None:
        image, palette = prediction.image, prediction.palette
    if 'gt_instances' in labels:
        objects = labels.gt_instances
        boxes = getattr(objects.bboxes, 'tensor', objects.bboxes).numpy()
        masks = objects.masks.to_ndarray().astype(bool) if 'masks' in objects else None
        numbers = objects.labels.numpy()
        return Boxes(image, classes, np.ones(len(boxes)), numbers, boxes, masks, palette=palette)
    if 'gt_sem_seg' in labels:
        numbers = np.minimum(labels.gt_sem_seg.data[0].numpy(), len(classes))
        # A class of their own, in grey, for pixels that are not labelled.
        colours = LabelMap(image, classes, numbers, palette=palette).colours().tolist()
        return LabelMap(image, [*classes, 'not labelled'], numbers, palette=[*colours, [128] * 3])
    return Classes(image, classes, np.eye(len(classes))[int(labels.gt_label)])


def _titled(prediction: Prediction) -> tuple[str, np.ndarray]:
    """A title and a picture: small pictures have no room for names of classes."""
    if isinstance(prediction, Classes):
        return prediction.classes[int(prediction.scores.argmax())], prediction.image
    return '', prediction.draw()


def draw_predictions(predictor: Any, cfg: Any, out: Path) -> None:
    """Labels beside predictions of the worst, typical and best pictures, and the confusions.

    Writes predictions.png, for label maps and classes confusion.png, and each shown prediction
    into the folder predictions.
    """
    with building(cfg):
        samples: Any = DATASETS.build(cfg.val_dataloader.dataset)
    classes, root = predictor.classes, cfg.val_dataloader.dataset.data_root
    rated, confusion = [], np.zeros((len(classes), len(classes)))
    for number in spread([*range(len(samples))], _PREDICTED):
        sample = samples[number]
        path = sample['data_samples'].img_path
        prediction = predictor.predict(path, _SCORE)
        label = _labelled(sample, classes, prediction)
        rating, matrix = _rated(label, prediction, len(classes))
        confusion += matrix
        rated.append((rating, Path(os.path.relpath(path, root)), label, prediction))
    rated.sort(key=lambda entry: entry[0])
    middle = max(0, len(rated) // 2 - 1)
    numbers = dict.fromkeys([0, 1, middle, middle + 1, len(rated) - 2, len(rated) - 1])
    pages = []
    for rating, name, label, prediction in (rated[n] for n in numbers if 0 <= n < len(rated)):
        truth, seen = _titled(label), _titled(prediction)
        pages.append((' '.join(filter(None, (truth[0], name.name))), truth[1]))
        words = 'predicted', seen[0], f'({rating:.2f} right)'
        pages.append((' '.join(filter(None, words)), seen[1]))
        prediction.save(out / 'predictions' / '_'.join(name.with_suffix('.png').parts))
    with _page(out / 'predictions.png', 13, 9) as figure:
        figure.suptitle('the worst, typical and best pictures of the validation part')
        _images(figure, pages, 4)
    if confusion.any():
        _draw_confusion(confusion, classes, out / 'confusion.png')


def _rated(label: Any, prediction: Any, count: int) -> tuple[float, np.ndarray]:
    """How right a prediction is, from 0 to 1, and a matrix of labels by predictions.

    Of boxes it is 2·matches / (labels + boxes), with matches of the class and an IoU of 0.5; of
    label maps the share of right pixels; of classes the score of the right one.
    """
    matrix = np.zeros((count, count))
    if isinstance(prediction, Classes):
        right = int(label.scores.argmax())
        matrix[right, prediction.scores.argmax()] = 1
        return float(prediction.scores[right]), matrix
    if isinstance(prediction, LabelMap):
        there = label.labels < count
        pairs = count * label.labels[there] + prediction.labels[there]
        matrix = np.bincount(pairs, minlength=count**2).reshape(count, count).astype(float)
        return matrix.trace() / max(1, matrix.sum()), matrix
    same = torch.from_numpy(prediction.labels)[:, None] == torch.from_numpy(label.labels)
    boxes = (torch.from_numpy(p.boxes).double() for p in (prediction, label))
    matches, overlaps = 0, box_iou(*boxes) * same
    for overlap in overlaps if overlaps.numel() else ():
        if overlap.max() >= 0.5:
            matches += 1
            overlaps[:, overlap.argmax()] = 0
    total = len(label.boxes) + len(prediction.boxes)
    return (2 * matches / total if total else 1.0), matrix


def _draw_confusion(matrix: np.ndarray, classes: Sequence[str], path: Path) -> None:
    """Draws, for each labelled class, the shares of the predicted classes."""
    shares, side = matrix / np.maximum(1, matrix.sum(1, keepdims=True)), len(classes)
    inches = 3 + 0.35 * min(side, _CLASSES)
    with _page(path, inches, inches) as figure:
        axes = figure.subplots()
        axes.imshow(shares, cmap='Blues', vmin=0, vmax=1)
        axes.set(title='share of each class', xlabel='predicted', ylabel='labelled')
        if side <= _CLASSES:
            _ticks(axes.xaxis, classes, rotation=90)
            _ticks(axes.yaxis, classes)
            for row, column in zip(*np.nonzero(shares >= 0.01), strict=True):
                share = shares[row, column]
                text, colour = f'{share:.2f}'.lstrip('0'), 'white' if share > 0.5 else 'black'
                axes.text(column, row, text, ha='center', va='center', color=colour, size=7)
