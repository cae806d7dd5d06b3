"""YOLO: a text file of boxes or polygons for each picture, and a list of the classes' names."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import numpy as np

from mmvttt.errors import DataError
from mmvttt.text import listed

from ..reading import Label, Reading
from ..text_files import read_lines, read_text, read_yaml
from ..tree import Tree
from ..write_coco import coco_box
from .names import NAMES, read_names

# Keys of data.yaml, and of Darknet's obj.data.
_KEYS = dict(train='train', val='val', valid='val', test='test')
_POINTS = 'for key points write kpt_shape into data.yaml, which reads their boxes'
_ADVICE = f'a box has five, without the score or track of a prediction; {_POINTS}'


def read(tree: Tree) -> Reading:
    """Reads labels/…/NAME.txt for images/…/NAME.jpg, or NAME.txt beside it."""
    reading = Reading('YOLO')
    labels: dict[str, str] = {}
    for source in tree.having('.txt'):
        folder, _, file = source.rpartition('/')
        stem = file[:-4]
        if file.lower() not in NAMES and ('labels' in folder.split('/') or tree.has(stem)):
            labels[source] = stem
    if not labels:
        return reading
    reading.evidence = f'{len(labels)} label files'
    in_yaml: Any = None
    shape = None
    for source in tree.having('.yaml', '.yml'):
        content = tree.content(source, read_yaml)
        if isinstance(content, dict) and content.get('names'):
            reading.used.add(source)
            if in_yaml not in (None, content['names']):
                reading.lacks.append(f'{source!r} has other names than another YAML: move one')
            in_yaml, shape = content['names'], content.get('kpt_shape')
            _follow(tree, reading, source, content)
    for source in tree.having('.data'):
        rows = (line.partition('=')[::2] for line in tree.content(source, read_lines) or ())
        _follow(tree, reading, source, {k.strip(): v.strip() for k, v in rows})
    names = _numbered(in_yaml or read_names(tree, reading))
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        reading.lacks.append(f'several classes have the name {twice[0]!r}')
    reading.classes = list(names.values())
    _read_labels(tree, reading, labels, names, shape)
    return reading


def _numbered(names: Any) -> dict[int, str]:
    """The names of a list, or of a dict of numbers; empty if it is neither."""
    names = [names] if isinstance(names, str) else names
    try:
        pairs = names.items() if isinstance(names, dict) else enumerate(names)
        numbered = {int(number): name for number, name in pairs if name != ''}
    except (TypeError, ValueError):
        return {}
    whole = all(isinstance(name, str) for name in numbered.values())
    return numbered if whole else {}


def _read_labels(
    tree: Tree, reading: Reading, labels: dict[str, str], names: dict[int, str], shape: Any
) -> None:
    entries = []
    # How many lines have so many columns.
    widths: Counter[int] = Counter()
    for source, stem in labels.items():
        label = Label(source, stem, stem=stem)
        try:
            rows = _rows(read_text(tree.path(source)), names, shape is not None)
            widths.update({width: len(group) for width, group in rows.items()})
            label.scaled = partial(_objects, rows, names, shape is not None)
        except (DataError, ValueError) as error:
            label.fault = str(error)
        entries.append(label)
    if not names:
        reading.lacks += [w for s, w in tree.left_out.items() if s.endswith(('.yaml', '.yml'))]
    wrong = [label for label in entries if label.fault]
    if wrong and not widths:
        label = wrong[0]
        reading.lacks.append(f'no label is in its format ({label.source!r}: {label.fault})')
    elif not names:
        reading.lacks.append('no names of the classes: write them into classes.txt, one a line')
    if reading.lacks:
        return
    reading.pair(tree, entries, 'label files')
    # A picture of a listed folder without a label file has no object; others are not annotated.
    images = {inner for part in reading.listed.values() for inner in part}
    for inner in sorted(images - {*reading.pictures, *reading.left_out}):
        reading.add(tree, inner, tree.part(inner), ())
    _say_kind(reading, widths, shape is not None)


def _say_kind(reading: Reading, widths: Counter[int], points: bool) -> None:
    """Says what kind of objects the lines hold, by how many have how many numbers."""
    if points:
        reading.notes.append('key points are not trained: the boxes of the labels are read')
    elif [*widths] == [9]:
        reading.notes.append(
            'every object has four corners, as oriented boxes (OBB) have: they are trained as '
            'outlines, with upright boxes around them'
        )
    elif len(widths) == 1 and max(widths) > 9 and widths.total() > 9:
        reading.lacks.append(f'each line has {max(widths)} numbers: {_POINTS}')


def _rows(text: str, names: dict[int, str], points: bool) -> dict[int, np.ndarray]:
    """The numbers of a label's lines, by how many a line has; raises ValueError.

    Without `names` the class may be any.
    """
    lines: dict[int, list[list[str]]] = defaultdict(list)
    for line in text.split('\n'):
        if numbers := line.split():
            lines[len(numbers)].append(numbers)
    rows = {width: np.array(group, float) for width, group in lines.items()}
    for width, group in rows.items():
        if names and (unknown := {*group[:, 0].tolist()} - {*names}):
            raise ValueError(f'class {min(unknown):g} is none of {listed([*names.values()])}')
        if width < 5 or (not points and width != 5 and (width < 7 or width % 2 == 0)):
            raise ValueError(f'{width} numbers in a line: neither box nor polygon; {_ADVICE}')
        # Key points have a visibility of 2.
        shares = group[:, 1 : 5 if points else None]
        if not (shares.min() >= -0.01 and shares.max() <= 1.01):
            raise ValueError('its numbers are not fractions of the picture, from 0 to 1')
    return rows


def _objects(
    rows: dict[int, np.ndarray], names: dict, points: bool, size: dict[str, int]
) -> list[dict]:
    """Boxes (centre, width and height) and polygons, in fractions: entries of `coco_json`."""
    objects = []
    for width, group in rows.items():
        labels = [names[int(number)] for number in group[:, 0]]
        sides = np.tile((size['width'], size['height']), width // 2)
        if width == 5 or points:
            centres, boxes = group[:, 1:3] * sides[:2], group[:, 3:5] * sides[:2]
            corners = np.hstack((centres - boxes / 2, centres + boxes / 2)).tolist()
            objects += [coco_box(name, *box) for name, box in zip(labels, corners, strict=True)]
            continue
        lines = group[:, 1:] * sides
        xs, ys = lines[:, ::2], lines[:, 1::2]
        corners = np.stack((xs.min(1), ys.min(1), xs.max(1), ys.max(1)), 1).tolist()
        for name, box, line in zip(labels, corners, lines.tolist(), strict=True):
            objects.append(coco_box(name, *box, segmentation=[line]))
    return objects


def _follow(tree: Tree, reading: Reading, source: str, content: dict[str, Any]) -> None:
    """Notes the pictures that a file lists for each part."""
    folder = source.rpartition('/')[0]
    for key, part in _KEYS.items():
        entries = content.get(key) or []
        for entry in entries if isinstance(entries, list) else [entries]:
            images = _images_of(tree, reading, str(entry), folder)
            if images is not None:
                reading.listed.setdefault(part, set()).update(images)
            elif key != 'test':
                reading.notes.append(f'{source}: {key} is {entry!r}, which does not exist')


def _images_of(tree: Tree, reading: Reading, entry: str, folder: str) -> set[str] | None:
    """The pictures that an entry names: one, those of a folder, or of a list of these."""
    inner = tree.locate(entry, folder)
    if inner is None or tree.is_image(inner):
        return None if inner is None else {inner}
    if os.path.isdir(tree.path(inner)):
        return {image for image in tree.images if image.startswith(f'{inner}/' if inner else '')}
    if not inner.endswith('.txt') or inner in reading.used:
        return set()
    reading.used.add(inner)
    lines = tree.content(inner, read_lines) or []
    images = [_images_of(tree, reading, line, inner.rpartition('/')[0]) for line in lines]
    reading.say_missing(inner, lines, images)
    return set().union(*filter(None, images))
