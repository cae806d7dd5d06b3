"""Checks of COCO's JSON: categories against classes, and what mmdet drops, ignores or fails on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .findings import LEARNED, Findings, Scope
from .images import check_images, pictures_in, spread

# A larger file is not parsed before a training: 50 MB take a second, COCO's train2017 ten.
LARGEST = 50 * 2**20
# Pixels by which rounding may move a box over the border.
_SLACK = 1.0
# Annotations whose boxes are compared with their masks before a training.
_QUICK = 2000
# Intersection over union of a box and its polygons.
_LEAST_OVERLAP = 0.5
_SHOWN = 8

_ONE = {'images': 'image', 'annotations': 'annotation', 'categories': 'category'}

Sizes = Mapping[Any, tuple[int, int]]


def _is_number(value: Any) -> bool:
    # An integer of JSON may be larger than any float.
    return type(value) in (int, float) and abs(value) < 1e308


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


# Allowed values in words, and a check.
_ID = 'a number or a text', lambda value: type(value) in (int, float, str)
_TEXT = 'a text', lambda value: isinstance(value, str)
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
    path: str,
    image_folder: str,
    classes: Sequence[str],
    findings: Findings,
    scope: Scope,
    *,
    training: bool,
    masks: bool,
    most: int | None = None,
) -> None:
    """Checks an annotation file; if not thorough, what a training would not report.

    A `training` file without boxes is an error. A model predicts at most `most` objects in a
    picture (`max_per_img`).
    """
    if not scope.thorough and os.path.getsize(path) > LARGEST:
        return
    content = _read(path, findings, training)
    if content is None:
        return
    counts = ', '.join(f'{len(content[part])} {part}' for part in _ENTRIES)
    findings.summary = f'{counts} in {path}'
    images, annotations, categories = (_whole(content, part, findings) for part in _ENTRIES)
    _check_categories([category['name'] for category in categories], classes, path, findings)
    sizes = {image['id']: (image['height'], image['width']) for image in images}
    names = {category['id']: category['name'] for category in categories}
    _check_types_of_ids('image_id', 'images', sizes, annotations, findings)
    _check_types_of_ids('category_id', 'categories', names, annotations, findings)
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
    learned = _count_learned(annotations, names, sizes, findings, masks)
    if not findings.errors and not learned:
        (findings.error if training else findings.warn)(
            f'{path} has no box to learn or to find: every annotation is of another category, a '
            'crowd, without area, outside its image, or without a polygon of three points'
        )
    if most is not None and (crowded := [n for n in learned.values() if n > most]):
        findings.warn(
            f'{len(crowded)} pictures have more than max_per_img={most} objects (up to '
            f'{max(crowded)}), of which no more can be found: set max_per_img in model.test_cfg'
        )
    _check_repeated(annotations, findings)
    for ann in annotations:
        _check_values(ann, findings, masks)
    some = annotations if scope.thorough else spread(annotations, _QUICK)
    _check_corners(some, findings)
    listed = _in_the_lists(annotations, names, sizes, findings, scope)
    if scope.thorough:
        _check_boxes(listed, sizes, findings, masks)
        for image in images:
            if image['id'] not in learned:
                findings.warn('images without a box', image['file_name'])
    files = [(os.path.join(image_folder, i['file_name']), sizes[i['id']]) for i in images]
    findings.files = {os.path.realpath(file) for file, _ in files}
    if image_folder:
        listed_files = {os.path.normpath(file) for file, _ in files}
        pictures = map(os.path.normpath, pictures_in(image_folder, scope))
        findings.unlisted = sum(path not in listed_files for path in pictures)
    check_images(files, findings, scope)


def _count_learned(
    annotations: Sequence[dict],
    names: Mapping[Any, str],
    sizes: Sizes,
    findings: Findings,
    masks: bool,
) -> Counter:
    """Counts the boxes that are learned of each image, and of each class with the reasons."""
    learned: Counter = Counter()
    for ann in annotations:
        name, size = names.get(ann['category_id']), sizes.get(ann['image_id'])
        if name not in (findings.classes or ()) or size is None:
            continue
        reason = why_not_learned(ann, size, masks)
        findings.counts[name][reason or LEARNED] += 1
        learned[ann['image_id']] += reason is None
    return +learned


def why_not_learned(ann: dict, size: tuple[int, int], masks: bool) -> str | None:
    """Why mmdet does not train on a box of one of the classes, or None."""
    if ann.get('iscrowd'):
        return 'crowds'
    if ann.get('ignore'):
        return 'marked ignore'
    if fault := _fault(ann, size):
        return 'outside' if 'outside' in fault else 'without area'
    mask = ann.get('segmentation')
    if masks and isinstance(mask, list) and mask and not _has_polygon(mask):
        return 'with an empty mask'
    return None


def _check_repeated(annotations: Sequence[dict], findings: Findings) -> None:
    """Reports objects that are listed twice, and an id that COCOeval takes for another meaning."""
    objects = Counter((a['image_id'], a['category_id'], *a['bbox']) for a in annotations)
    again = sum(count - 1 for count in objects.values())
    if again:
        findings.warn(
            f'{again} annotations have the image, category and box of another one: each counts '
            'twice in the loss, and only one of them can be found'
        )
    for ann in annotations:
        if ann['id'] == 0:
            findings.warn(
                'annotations with id 0, which COCOeval takes for "not matched": mmvttt counts from '
                '1 instead, other programs measure too little',
                f'annotation {ann["id"]}',
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
        content_text = ', '.join(map(repr, parts)) or f'a {type(content).__name__}'
        findings.error(
            f'{path} has no list {" and no list ".join(wrong)}, but {content_text}: it is not in '
            "the format of COCO's instances, see docs/own_data.md"
        )
        return None
    return content


def _check_types_of_ids(
    key: str, part: str, ids: Collection, annotations: Sequence[dict], findings: Findings
) -> None:
    """Reports ids of mixed types: a text among numbers, or a number among texts, matches no id."""
    for ann in annotations:
        value = ann[key]
        if value in ids:
            continue
        other: Any = str(value)
        if isinstance(value, str):
            try:
                other = int(value)
            except ValueError:
                continue
        if other in ids:
            kinds = ('a text', 'numbers') if isinstance(value, str) else ('a number', 'texts')
            findings.error(
                f'annotations whose {key} is {kinds[0]} but the ids of {part} are {kinds[1]}',
                f'annotation {ann["id"]} ({value!r})',
            )


def _whole(content: dict[str, list], part: str, findings: Findings) -> list[dict]:
    """The entries with all required keys; the others, and duplicates, are errors."""
    whole = []
    for number, item in enumerate(content[part]):
        entry = item if isinstance(item, dict) else {}
        for key, (allowed, is_allowed) in _ENTRIES[part].items():
            value = entry.get(key)
            if is_allowed(value):
                continue
            problem = f'is missing or not {allowed}'
            if any(isinstance(x, str) for x in (value if isinstance(value, list) else [value])):
                problem += ' (text, not numbers)'
            name = f'{entry["id"]!r}' if _ID[1](entry.get('id')) else f'number {number}'
            shown = f' has {value!r:.80}' if key in entry else ''
            findings.error(f'{part} whose {key} {problem}', f'{_ONE[part]} {name}{shown}')
            break
        else:
            whole.append(entry)
    for key in ('id', 'name') if part == 'categories' else ('id',):
        for value in _repeated([entry[key] for entry in whole]):
            findings.error(f'{key}s of several {part}', repr(value))
    if part == 'images':
        for name in _repeated([image['file_name'] for image in whole]):
            findings.warn('files that are listed several times', name)
    return whole


def _check_categories(
    names: Sequence[str], classes: Sequence[str], path: str, findings: Findings
) -> None:
    """Compares the categories with the classes: mmdet matches names, and drops other categories."""
    matched = tuple(name for name in names if name in classes)
    if not matched:
        findings.error(
            f'no class of metainfo is a category of {path}, so that every box would be dropped: '
            f'the classes are {_listed(classes)}, the categories {_listed(names)}'
            f'{_nearly(classes, names)}; '
            f"set metainfo=dict(classes={_as_tuple(names)}), and the heads' num_classes"
        )
        return
    findings.classes = matched
    absent = [name for name in classes if name not in names]
    if absent:
        findings.warn(
            f'classes of metainfo that are not categories of {path}: {_listed(absent)}'
            f'{_nearly(absent, names)}'
        )
    dropped = [name for name in names if name not in classes]
    if dropped:
        findings.warn(
            f'categories that are dropped, because they are no class of metainfo: '
            f'{_listed(dropped)}'
        )
    if matched != tuple(classes):
        findings.warn(
            'labels follow the order of categories in the file, but pictures get the names in '
            f'metainfo: write classes={_as_tuple(matched)}'
        )


def _fault(ann: dict, size: tuple[int, int]) -> str | None:
    """Reason why mmdet drops a box `(x, y, width, height)` of an image (height, width), or None."""
    x, y, width, height = ann['bbox']
    if ann['area'] <= 0 or width < 1 or height < 1:
        return 'boxes without area, or thinner than a pixel, which are dropped'
    if min(x + width, size[1]) <= max(x, 0) or min(y + height, size[0]) <= max(y, 0):
        return 'boxes outside their image, which are dropped'
    return None


def _check_values(ann: dict, findings: Findings, masks: bool) -> None:
    """Reports faults that a training hides: it ignores the box, or learns another mask."""
    name = f'annotation {ann["id"]}'
    for flag in ('iscrowd', 'ignore'):
        if ann.get(flag, 0) not in (0, 1):
            findings.error(f'annotations whose {flag} is neither 0 nor 1', name)
    mask = ann.get('segmentation')
    if not masks or not mask or isinstance(mask, dict):
        return
    if not isinstance(mask, list) or not all(isinstance(polygon, list) for polygon in mask):
        findings.error('masks that are neither polygons nor RLE', name)
    elif not all(_is_number(n) for polygon in mask for n in polygon):
        findings.error('polygons with values that are not numbers', name)


def _check_corners(annotations: Sequence[dict], findings: Findings) -> None:
    """Reports boxes that contradict their mask or area, mostly because they are (x1, y1, x2, y2).

    If nearly every box is in that format, it is an error.
    """
    kinds = [_contradiction(ann) for ann in annotations]
    judged = len(kinds) - kinds.count(None)
    mostly = findings.error if kinds.count('corners') > judged / 2 else findings.warn
    for ann, kind in zip(annotations, kinds, strict=True):
        example = f'annotation {ann["id"]} {ann["bbox"]}'
        if kind == 'corners':
            mostly(
                'boxes that are (x1, y1, x2, y2) according to their mask or area, instead of (x, '
                'y, width, height)',
                example,
            )
        elif kind == 'other':
            findings.warn(
                'boxes that are not around their mask, or smaller than their area', example
            )


def _contradiction(ann: dict) -> str | None:
    """'corners', 'other', 'none', or None if undecidable."""
    x, y, width, height = ann['bbox']
    around = _bounds(ann.get('segmentation'))
    if around is not None:
        box, as_corners = (x, y, x + width, y + height), (x, y, width, height)
        slack = 1 + 0.02 * max(around[2] - around[0], around[3] - around[1])
        if _far(box, around, slack) and not _far(as_corners, around, slack):
            return 'corners'
        return 'other' if _overlap(box, around) < _LEAST_OVERLAP else 'none'
    area = ann['area']
    if ann.get('segmentation') or not 0 < area < 1e308 or min(width, height) <= 0:
        return None
    of_corners = (width - x) * (height - y) if width > x and height > y else 0
    if abs(area - of_corners) <= 0.01 * area < abs(area - width * height):
        return 'corners'
    return 'other' if area > 1.1 * width * height + 2 else 'none'


def _bounds(mask: Any) -> tuple[float, float, float, float] | None:
    """(x1, y1, x2, y2) around polygons, or None."""
    polygons = mask if isinstance(mask, list) else []
    if not all(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in polygons):
        return None
    numbers = [n for polygon in polygons for n in polygon]
    if not numbers or not all(map(_is_number, numbers)):
        return None
    xs, ys = ([n for p in polygons for n in p[i::2]] for i in (0, 1))
    return min(xs), min(ys), max(xs), max(ys)


def _far(one: Sequence[float], other: Sequence[float], slack: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > slack


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2)."""
    sides = [min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1)]
    shared = max(sides[0], 0) * max(sides[1], 0)
    areas = [max(b[2] - b[0], 0) * max(b[3] - b[1], 0) for b in (one, other)]
    return shared / (sum(areas) - shared) if sum(areas) > shared else 1.0


def _in_the_lists(
    annotations: Sequence[dict],
    categories: Collection,
    sizes: Sizes,
    findings: Findings,
    scope: Scope,
) -> list[dict]:
    """The annotations whose image and category are listed; the others, which mmdet drops, are
    errors, or warnings before a training.
    """
    report = findings.error if scope.thorough else findings.warn
    listed = []
    for ann in annotations:
        name = f'annotation {ann["id"]}'
        if ann['image_id'] not in sizes:
            report('annotations of an image that is not listed', f'{name} ({ann["image_id"]!r})')
        elif ann['category_id'] not in categories:
            report(
                'annotations of a category that is not listed',
                f'{name} (category {ann["category_id"]!r})',
            )
        else:
            listed.append(ann)
    return listed


def _check_boxes(
    annotations: Sequence[dict], sizes: Sizes, findings: Findings, masks: bool
) -> None:
    """Reports boxes without a mask, and boxes that are dropped."""
    for ann in annotations:
        name, size = f'annotation {ann["id"]}', sizes[ann['image_id']]
        if fault := _fault(ann, size):
            findings.warn(fault, f'{name} {ann["bbox"]}')
        else:
            x, y, width, height = ann['bbox']
            over = max(-x, -y, x + width - size[1], y + height - size[0])
            if over > _SLACK:
                findings.warn(
                    'boxes that reach over the border of their image', f'{name} (by {over:g})'
                )
            if masks and not ann.get('ignore'):
                _check_mask(ann.get('segmentation'), size, name, findings)


def _check_mask(mask: Any, size: tuple[int, int], name: str, findings: Findings) -> None:
    """Reports masks that are missing, of another size, or of too few points."""
    if not mask:
        findings.error('boxes without a mask, although masks are loaded', name)
    elif isinstance(mask, dict):
        runs = mask.get('counts')
        if isinstance(runs, str):
            runs = _decoded(runs)
        whole = (
            isinstance(runs, list)
            and all(type(n) is int and n >= 0 for n in runs)
            and sum(runs) == size[0] * size[1]
        )
        if mask.get('size') != list(size) or not whole:
            findings.error('masks (RLE) that do not fill their image', name)
    elif not _has_polygon(mask):
        findings.warn('boxes whose polygons have fewer than three points, which are ignored', name)


def _has_polygon(mask: list) -> bool:
    """Whether mmdet takes any of the polygons."""
    return any(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in mask)


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


def _as_tuple(names: Sequence) -> str:
    """A tuple in Python's notation, with the comma of a single name, shortened if it is long."""
    if len(names) <= _SHOWN:
        return repr(tuple(names))
    return f'({", ".join(map(repr, names[:_SHOWN]))}, …)'


def _nearly(names: Sequence, others: Sequence) -> str:
    """Names that differ from others only by blanks or capitals."""
    plain = {str(name).strip().casefold(): name for name in others}
    pairs = [(n, plain[k]) for n in names if (k := str(n).strip().casefold()) in plain]
    return ''.join(f'; {a!r} is nearly {b!r}' for a, b in pairs[:_SHOWN])


def _repeated(items: list) -> list:
    return [item for item, count in Counter(items).items() if count > 1]


def _listed(names: Sequence) -> str:
    more = f', … ({len(names)})' if len(names) > _SHOWN else ''
    return ', '.join(map(repr, names[:_SHOWN])) + more
