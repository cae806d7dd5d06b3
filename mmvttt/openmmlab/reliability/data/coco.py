"""Checks of COCO's JSON: categories against classes, and what mmdet drops, ignores or fails on."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from operator import itemgetter
from typing import Any

import numpy as np

from .findings import Findings, Scope
from .images import check_images, real_paths

# A larger file is not parsed before a training: 20 MB take a second, COCO's train2017 twenty.
LARGEST = 20 * 2**20
_SHOWN = 8
_WRITTEN = 'boxes that are {} according to their mask or area, instead of (x, y, width, height)'
# Reasons why a box is not learned that are faults of the file.
_THIN, _OUTSIDE = 'without area', 'outside their image'
_EMPTY = 'with a mask of fewer than three points'

Sizes = Mapping[Any, tuple[int, int]]


def _is_number(value: Any) -> bool:
    # An integer of JSON may be larger than any float.
    return type(value) in (int, float) and abs(value) < 1e308


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


# Allowed values in words, and a check.
_ID = 'a number or a text', lambda value: type(value) in (int, float, str)
_TEXT = 'a text', lambda value: isinstance(value, str) and '\0' not in value
_SIDE = 'an integer above 0', lambda x: _is_number(x) and x > 0 and x == int(x)
# mmdet only checks that it is above 0.
_AREA = 'a number', lambda value: type(value) in (int, float)
# The lists of a file, and the required keys of their entries.
_ENTRIES: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    'images': dict(id=_ID, file_name=_TEXT, height=_SIDE, width=_SIDE),
    'annotations': dict(
        id=_ID, image_id=_ID, category_id=_ID, bbox=('four numbers', _is_box), area=_AREA
    ),
    'categories': dict(id=_ID, name=_TEXT),
}


def check_coco(
    dataset: Any,
    findings: Findings,
    scope: Scope,
    *,
    is_training: bool,
    needs_boxes: bool,
    masks: bool,
    most: tuple[str, int] | None,
) -> None:
    """Checks a `CocoDataset` that is not loaded yet; a large file only if thorough.

    Without boxes, a data set that `needs_boxes` is an error. `most` is the name of the option that
    bounds the objects a detector returns for a picture, and its value.
    """
    path = dataset.ann_file
    if not os.path.isfile(path):
        findings.error(f'ann_file {path!r} is not a file: set it to the JSON of the annotations')
        return
    if not scope.thorough and os.path.getsize(path) > LARGEST:
        return
    content = _read(path, findings, is_training)
    if content is None:
        return
    counts = ', '.join(f'{len(content[part])} {part}' for part in _ENTRIES)
    findings.summary = f'{counts} in {path}'
    images, annotations, categories = (_whole(content, part, findings) for part in _ENTRIES)
    classes = dataset.metainfo.get('classes') or ()
    _check_categories([category['name'] for category in categories], classes, path, findings)
    sizes = {image['id']: (image['height'], image['width']) for image in images}
    names = {category['id']: category['name'] for category in categories}
    listed = _in_the_lists(annotations, names, sizes, findings)
    if masks and annotations and not any(ann.get('segmentation') for ann in annotations):
        findings.error(
            f'no annotation of {path} has a mask, and the config loads masks: to train boxes '
            'alone, inherit a config of boxes such as fasterrcnn_vittt_s_1x.py (docs/own_data.md, '
            '"Boxes alone")'
        )
    sides = [max(ann['bbox']) for ann in annotations]
    if sides and 0 < max(sides) <= 1:
        findings.error(
            'all boxes lie between 0 and 1: they are fractions of the picture, and COCO has '
            'pixels; multiply x and width by its width, y and height by its height'
        )
    for ann in listed:
        _check_values(ann, sizes[ann['image_id']], masks, findings, scope.thorough)
    if not findings.errors:
        _check_learned(dataset, listed, names, images, masks, needs_boxes, findings, scope)
        learned = findings.learned
        if not any(learned.values()):
            (findings.error if needs_boxes else findings.warn)(
                f'{path} has no box to learn or to find: every annotation is of another category, '
                'a crowd, without area, outside its image, without a polygon of three points, or '
                'in a picture that filter_cfg drops'
            )
        many = [number for number in learned.values() if most and number > most[1]]
        if most and many:
            findings.warn(
                f'{len(many)} pictures have more objects, up to {max(many)}, than the model '
                f'returns: the others count as missed; raise {most[0]}={most[1]}'
            )
        for image in images if scope.thorough else ():
            if not learned.get(image['id']):
                findings.warn('images without a box', image['file_name'])
    _check_repeated(annotations, findings)
    _check_readings(listed, sizes, scope.thorough, findings)
    folder = dataset.data_prefix.get('img') or ''
    files = [(os.path.join(folder, i['file_name']), sizes[i['id']]) for i in images]
    findings.files = real_paths((file for file, _ in files), scope)
    check_images(files, findings, scope)


def _check_learned(
    dataset: Any,
    listed: Sequence[dict],
    names: Mapping[Any, str],
    images: Sequence[dict],
    masks: bool,
    needs_boxes: bool,
    findings: Findings,
    scope: Scope,
) -> None:
    """The account: what the data set, loaded and filtered, leaves of each class, and why."""
    dataset.serialize_data = False
    try:
        with redirect_stdout(StringIO()):
            dataset.full_init()
    except Exception as error:
        # A toolbox may raise any type of error.
        findings.error(f'the data set cannot be loaded ({type(error).__name__}: {error})')
        return
    classes = findings.classes or ()
    learned: Counter[str] = Counter()
    for info in dataset.data_list:
        labels = [i['bbox_label'] for i in info['instances'] if _is_learned(i, masks)]
        learned.update(classes[label] for label in labels)
        findings.learned[info['img_id']] = len(labels)
    small = (getattr(dataset, 'filter_cfg', None) or {}).get('min_size', 0)
    if not dataset.test_mode:
        dropped = sum(min(i['height'], i['width']) < small for i in images)
        if dropped:
            findings.warn(
                f'{dropped} of {len(images)} pictures are too small: a side is below '
                f'filter_cfg.min_size={small}, so they are dropped'
            )
    reasons: dict[str, Counter[str]] = {name: Counter() for name in classes}
    sizes = {image['id']: (image['height'], image['width']) for image in images}
    for ann in listed:
        if (name := names[ann['category_id']]) not in reasons:
            continue
        reason = why_not_learned(ann, sizes[ann['image_id']], masks)
        if scope.thorough and reason in (_THIN, _OUTSIDE, _EMPTY):
            findings.warn(f'boxes {reason}, which are not learned', _example(ann, 'bbox'))
        if reason is None and ann['image_id'] not in findings.learned:
            reason = 'in pictures that are left out'
        reasons[name][reason or 'learned'] += 1
    for name, counts in reasons.items():
        others = ', '.join(f'{n} {reason}' for reason, n in counts.items() if reason != 'learned')
        text = f'{name}: {counts.total()} listed, {learned[name]} learned'
        findings.account.append(f'{text} ({others})' if others else text)
        if needs_boxes and not learned[name] and any(learned.values()):
            findings.warn('classes of which nothing is learned', f'{name!r} ({others or "none"})')


def _is_learned(instance: Mapping[str, Any], masks: bool) -> bool:
    mask = instance.get('mask')
    empty = masks and isinstance(mask, list) and not any(map(_is_polygon, mask))
    return not (instance['ignore_flag'] or empty)


def why_not_learned(ann: dict, size: tuple[int, int], masks: bool) -> str | None:
    """Why mmdet does not train on a box in an image of (height, width), or None."""
    if ann.get('iscrowd'):
        return 'crowds'
    if ann.get('ignore'):
        return 'marked ignore'
    x, y, width, height = ann['bbox']
    if ann['area'] <= 0 or width < 1 or height < 1:
        return _THIN
    if min(x + width, size[1]) <= max(x, 0) or min(y + height, size[0]) <= max(y, 0):
        return _OUTSIDE
    mask = ann.get('segmentation')
    if masks and isinstance(mask, list) and mask and not any(map(_is_polygon, mask)):
        return _EMPTY
    return None


def _is_polygon(points: Any) -> bool:
    return isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0


def _example(ann: dict, key: str) -> str:
    return f'annotation {ann["id"]} ({ann[key]!r})'


def _check_repeated(annotations: Sequence[dict], findings: Findings) -> None:
    """Reports objects that are listed twice, and an id that COCOeval takes for another meaning."""
    again, groups = 0, defaultdict(list)
    for ann in annotations:
        if not ann.get('iscrowd'):
            groups[ann['image_id'], ann['category_id']].append(ann['bbox'])
    for boxes in groups.values():
        boxes.sort()
        for i, box in enumerate(boxes):
            slack = min(1, 0.1 * min(box[2:]))
            # As far as x differs by a pixel at most.
            near = boxes[bisect_left(boxes, box[0] - 1, key=itemgetter(0)) : i]
            again += any(not _far(box, other, slack) for other in near)
    if again:
        findings.warn(
            f'{again} annotations have the image, category and box of another one (to a pixel): '
            'each counts twice in the loss, and only one of them can be found'
        )
    if any(ann['id'] == 0 for ann in annotations):
        findings.warn(
            'an annotation has the id 0, which COCOeval takes for "not matched": mmvttt counts '
            'from 1 instead, other programs measure too little'
        )


def _read(path: str, findings: Findings, training: bool) -> dict[str, list] | None:
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        findings.error(f'{path} is not JSON, or is truncated ({error}); download or write it again')
        return None
    parts = content if isinstance(content, dict) else {}
    if parts and not training:
        # A test set whose annotations are secret.
        parts.setdefault('annotations', [])
    wrong = [part for part in _ENTRIES if not isinstance(parts.get(part), list)]
    if wrong:
        findings.error(
            f'{path} has no list {" and no list ".join(wrong)}: it is not in the format of '
            "COCO's instances, see docs/own_data.md"
        )
        return None
    return content


def _whole(content: dict[str, list], part: str, findings: Findings) -> list[dict]:
    """The entries with all required keys; the others, and duplicates, are errors."""
    whole = []
    for number, item in enumerate(content[part]):
        entry = item if isinstance(item, dict) else {}
        for key, (allowed, is_allowed) in _ENTRIES[part].items():
            if not is_allowed(entry.get(key)):
                name = f'id {entry["id"]!r}' if _ID[1](entry.get('id')) else f'number {number}'
                findings.error(
                    f'{part} whose {key} is missing or not {allowed}',
                    f'{name} ({entry.get(key)!r:.80})',
                )
                break
        else:
            whole.append(entry)
    for key in ('id', 'name') if part == 'categories' else ('id',):
        for value, count in Counter(entry[key] for entry in whole).items():
            if count > 1:
                findings.error(f'{key}s of several {part}', repr(value))
    return whole


def _check_categories(
    names: Sequence[str], classes: Sequence[str], path: str, findings: Findings
) -> None:
    """Compares the categories with the classes: mmdet matches names, and drops other categories."""
    matched = tuple(name for name in names if name in classes)
    if not matched:
        findings.error(
            f'no class of metainfo is a category of {path}, so that every box would be dropped: '
            f'the classes are {_listed(classes)}, the categories {_listed(names)}; '
            f"set metainfo=dict(classes={tuple(names)}), and the heads' num_classes"
        )
        return
    findings.classes = matched
    absent = [name for name in classes if name not in names]
    if absent:
        findings.warn(f'classes of metainfo that are not categories of {path}: {_listed(absent)}')
    dropped = [name for name in names if name not in classes]
    if dropped:
        findings.warn(
            f'categories that are dropped, because they are no class of metainfo: '
            f'{_listed(dropped)}'
        )
    if matched != tuple(classes):
        findings.warn(
            'labels follow the order of categories in the file, but pictures get the names in '
            f'metainfo: write classes={matched}'
        )


def _in_the_lists(
    annotations: Sequence[dict], categories: Collection, sizes: Sizes, findings: Findings
) -> list[dict]:
    """The annotations whose image and category are listed; mmdet drops the others."""
    listed = []
    parts = {'image_id': ('images', sizes), 'category_id': ('categories', categories)}
    texts = {key: set(map(str, ids)) for key, (_, ids) in parts.items()}
    for ann in annotations:
        key = next((key for key, (_, ids) in parts.items() if ann[key] not in ids), None)
        if key is None:
            listed.append(ann)
        elif str(ann[key]) in texts[key]:
            is_text = isinstance(ann[key], str)
            here, there = ('a text', 'numbers') if is_text else ('a number', 'texts')
            text = f'annotations whose {key} is {here} but the ids of {parts[key][0]} are {there}'
            findings.error(text, _example(ann, key))
        else:
            findings.warn(f'annotations whose {key} is not listed', _example(ann, key))
    return listed


def _check_values(
    ann: dict, size: tuple[int, int], masks: bool, findings: Findings, thorough: bool
) -> None:
    """Reports faults that a training hides: it ignores the box, or learns another mask."""
    name, mask = f'annotation {ann["id"]}', ann.get('segmentation')
    for flag in ('iscrowd', 'ignore'):
        if ann.get(flag, 0) not in (0, 1):
            findings.error(f'annotations whose {flag} is neither 0 nor 1', name)
    if not masks:
        return
    if not mask:
        if why_not_learned(ann, size, masks) in (None, 'crowds'):
            findings.error('boxes without a mask, although masks are loaded', name)
    elif isinstance(mask, dict):
        runs = mask.get('counts')
        runs = _decoded(runs) if thorough and isinstance(runs, str) else runs
        if thorough and (mask.get('size') != list(size) or not _fills(runs, size)):
            findings.error('masks (RLE) that do not fill their image', name)
    elif not isinstance(mask, list) or not all(
        isinstance(polygon, list) and all(map(_is_number, polygon)) for polygon in mask
    ):
        findings.error('masks that are neither RLE nor polygons of numbers', name)


def _decoded(text: str) -> list[int]:
    """The runs of COCO's compressed RLE, as far as it can be decoded.

    A number has five bits a character, the lowest first, of which a sixth says whether more follow;
    from the fourth on, it is the difference from the run two before.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return runs if not shift else []


def _check_readings(
    annotations: Sequence[dict], sizes: Sizes, rle: bool, findings: Findings
) -> None:
    """Reports boxes that another convention than COCO's puts around their mask, or none.

    An error if most are. Without masks, areas tell corners, which one right box may do by chance.
    """
    readings = [_reading(ann, sizes[ann['image_id']], rle) for ann in annotations]
    judged = [reading for reading in readings if reading is not None]
    for ann, reading in zip(annotations, readings, strict=True):
        if reading:
            most = judged.count(reading) > len(judged) / 2
            if most or ann.get('segmentation'):
                (findings.error if most else findings.warn)(reading, _example(ann, 'bbox'))


def _reading(ann: dict, size: tuple[int, int], rle: bool) -> str | None:
    """How a box is written by its mask or area, '' for COCO's way, or None if undecidable."""
    x, y, width, height = corners = ann['bbox']
    if min(width, height) <= 0:
        return None
    if not ann.get('segmentation'):
        area = ann['area']
        if not 0 < area < 1e308:
            return None
        of_corners = (width - x) * (height - y) if width > x and height > y else 0
        is_other = abs(area - of_corners) <= 0.01 * area < abs(area - width * height)
        return _WRITTEN.format('(x1, y1, x2, y2)') if is_other else ''
    bounds = _bounds(ann['segmentation'], size, rle)
    if bounds is None:
        return None
    box = x, y, x + width, y + height
    sides = bounds[2] - bounds[0], bounds[3] - bounds[1]
    slack = 1 + 0.02 * max(sides)
    if not _far(box, bounds, slack):
        return ''
    if max(bounds) <= 1 < max(corners):
        return 'masks whose polygons lie between 0 and 1, whereas their boxes are in pixels'
    others = {
        '(x1, y1, x2, y2)': corners,
        '(cx, cy, width, height)': (x - width / 2, y - height / 2, x + width / 2, y + height / 2),
        '(y, x, height, width)': (y, x, y + height, x + width),
        '(y1, x1, y2, x2)': (y, x, height, width),
    }
    for name, other in others.items():
        if not _far(other, bounds, slack):
            return _WRITTEN.format(name)
    # Boxes may be larger than what is visible, and cut off a little of it.
    slack = 2 + 0.1 * max(sides)
    outside = min(bounds[0] - x, bounds[1] - y, box[2] - bounds[2], box[3] - bounds[3])
    return 'boxes that do not hold their mask' if outside < -slack else ''


def _bounds(mask: Any, size: tuple[int, int], rle: bool) -> tuple[float, ...] | None:
    """(x1, y1, x2, y2) of polygons, or if asked for, of a mask in RLE; None if it has none."""
    if isinstance(mask, list):
        if not all(map(_is_polygon, mask)) or not all(_is_number(n) for p in mask for n in p):
            return None
        xs, ys = ([n for polygon in mask for n in polygon[k::2]] for k in (0, 1))
        return min(xs), min(ys), max(xs), max(ys)
    if not rle or not isinstance(mask, dict):
        return None
    runs: Any = mask.get('counts')
    runs = _decoded(runs) if isinstance(runs, str) else runs
    if not _fills(runs, size):
        return None
    pixels = np.repeat(np.arange(len(runs)) % 2, runs).reshape(size[::-1])
    columns, rows = (np.flatnonzero(pixels.any(axis)) for axis in (1, 0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else None


def _fills(runs: Any, size: tuple[int, int]) -> bool:
    return (
        isinstance(runs, list)
        and all(type(n) is int and n >= 0 for n in runs)
        and sum(runs) == size[0] * size[1]
    )


def _far(one: Sequence[float], other: Sequence[float], slack: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > slack


def _listed(names: Sequence) -> str:
    more = f', … ({len(names)})' if len(names) > _SHOWN else ''
    return ', '.join(map(repr, names[:_SHOWN])) + more
