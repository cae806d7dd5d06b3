"""Checks of COCO's JSON: categories against classes, and what mmdet drops, ignores or fails on."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mmvttt.text import listed

from .findings import Findings
from .images import check_images, real_paths

# A larger file is not parsed before a training: 20 MB take a second, COCO's train2017 twenty.
LARGEST = 20 * 2**20
_CONVENTION = 'COCO has (x, y, width, height) in pixels, not corners, centres or fractions'
# Why an object is not learned where this is what the file says.
_MEANT = 'crowds', 'marked ignore'

Sizes = Mapping[Any, tuple[int, int]]


def _is_number(value: Any) -> bool:
    # An integer of JSON may be larger than any float.
    return type(value) in (int, float) and abs(value) < 1e308


def _is_mask(value: Any) -> bool:
    return isinstance(value, dict | None) or (
        isinstance(value, list)
        and all(isinstance(polygon, list) and all(map(_is_number, polygon)) for polygon in value)
    )


def is_id(value: Any) -> bool:
    """Whether a value of JSON can be an id."""
    return type(value) in (int, float, str)


def is_box(value: Any) -> bool:
    """Whether a value of JSON is a list of four numbers."""
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


# Allowed values in words, and a check.
_ID = 'a number or a text', is_id
_TEXT = 'a text', lambda value: isinstance(value, str) and not re.search('[\0\ud800-\udfff]', value)
_SIDE = 'an integer above 0', lambda x: _is_number(x) and x > 0 and x == int(x)
_BOX = 'four numbers', is_box
# mmdet only checks that it is above 0.
_AREA = 'a number', lambda value: type(value) in (int, float)
_FLAG = '0 or 1', lambda value: value in (None, 0, 1)
_MASK = 'RLE or polygons of numbers', _is_mask
# The lists of a file, and the allowed values of their entries' keys.
_ENTRIES: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    'images': dict(id=_ID, file_name=_TEXT, height=_SIDE, width=_SIDE),
    'annotations': dict(
        id=_ID, image_id=_ID, category_id=_ID, bbox=_BOX, area=_AREA,
        iscrowd=_FLAG, ignore=_FLAG, segmentation=_MASK,
    ),
    'categories': dict(id=_ID, name=_TEXT),
}  # fmt: skip


def check_coco(
    dataset: Any,
    findings: Findings,
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
    path, classes = dataset.ann_file, dataset.metainfo.get('classes') or ()
    if (content := _read(path, findings, is_training)) is None:
        return
    counts = ', '.join(f'{len(content[part])} {part}' for part in _ENTRIES)
    findings.summary = f'{counts} in {path}'
    images, listed, categories = coco_entries(content, findings)
    names = {category['id']: category['name'] for category in categories}
    _check_categories([*names.values()], classes, path, findings)
    sizes = {image['id']: (image['height'], image['width']) for image in images}
    if masks:
        _check_masks(listed, sizes, findings)
    if not findings.errors:
        try:
            dataset.serialize_data = False
            dataset.full_init()
        except Exception as error:
            # A toolbox may raise any type of error.
            findings.error(f'the data set cannot be loaded ({type(error).__name__}: {error})')
            return
        # The labels that are learned in each picture that its filters leave.
        learned = {
            info['img_id']: [i['bbox_label'] for i in info['instances'] if _is_learned(i, masks)]
            for info in dataset.data_list
        }
        chosen = sizes if dataset._indices is None else learned
        left_out = f'in pictures that filter_cfg={dataset.filter_cfg} leaves out'
        reasons: dict[str, Counter[str | None]] = {name: Counter() for name in classes}
        for ann in listed:
            if (name := names[ann['category_id']]) in reasons and ann['image_id'] in chosen:
                why = _why_not_learned(ann, sizes[ann['image_id']], masks)
                why = why or (None if ann['image_id'] in learned else left_out)
                reasons[name][why] += 1
                if why not in (None, *_MEANT):
                    findings.warn(f'objects that are not learned, {why}', f'annotation {ann["id"]}')
        _account(reasons, learned, needs_boxes, findings)
        for image, labels in learned.items():
            if most and len(labels) > most[1]:
                findings.warn(
                    'pictures with more objects than the model returns, of which the others count '
                    f'as missed: raise {most[0]}={most[1]}',
                    f'id {image!r} ({len(labels)})',
                )
        for image in images if findings.thorough else ():
            if image['id'] in chosen and not learned.get(image['id']):
                findings.warn('images without a box', image['file_name'])
    _check_repeated(listed, findings)
    check_conventions(listed, sizes, findings)
    folder = dataset.data_prefix.get('img') or ''
    files = [(os.path.join(folder, i['file_name']), sizes[i['id']]) for i in images]
    findings.files = real_paths((file for file, _ in files), findings.thorough)
    check_images(files, findings)


def _check_masks(annotations: Sequence[dict], sizes: Sizes, findings: Findings) -> None:
    """Reports objects without a mask, and masks in RLE that do not fill their image."""
    for ann in annotations:
        mask, size = ann.get('segmentation'), sizes[ann['image_id']]
        if not mask and _why_not_learned(ann, size, True) in (None, _MEANT[0]):
            findings.error(
                'boxes without a mask, although masks are loaded: to train boxes alone, inherit a '
                'config of boxes such as fasterrcnn_vittt_s_1x.py',
                f'annotation {ann["id"]}',
            )
        elif findings.thorough and isinstance(mask, dict) and runs_of(mask, size) is None:
            findings.error('masks (RLE) that do not fill their image', f'annotation {ann["id"]}')


def _account(
    reasons: Mapping[str, Counter[str | None]],
    learned: Mapping[Any, Sequence[int]],
    needs_boxes: bool,
    findings: Findings,
) -> None:
    """Reports what is listed and learned of each class, and the reasons why the rest is not."""
    matched = findings.classes or ()
    counts = Counter(matched[label] for labels in learned.values() for label in labels)
    for name, whys in reasons.items():
        others = ', '.join(f'{count} {why}' for why, count in whys.items() if why)
        text = f'{name}: {whys.total()} listed, {counts[name]} learned'
        findings.account.append(f'{text} ({others})' if others else text)
        if needs_boxes and not counts[name] and counts:
            findings.warn('classes of which nothing is learned', f'{name!r} ({others or "none"})')
    if not counts:
        (findings.error if needs_boxes else findings.warn)(
            f'there is no box to learn or to find: {"; ".join(findings.account)}'
        )


def _is_learned(instance: Mapping[str, Any], masks: bool) -> bool:
    mask = instance.get('mask')
    empty = masks and isinstance(mask, list) and not any(map(_is_polygon, mask))
    return not (instance['ignore_flag'] or empty)


def _why_not_learned(ann: dict, size: tuple[int, int], masks: bool) -> str | None:
    """Why mmdet does not train on a box in an image of (height, width), or None."""
    if ann.get('iscrowd'):
        return _MEANT[0]
    if ann.get('ignore'):
        return _MEANT[1]
    x, y, width, height = ann['bbox']
    if ann['area'] <= 0 or width < 1 or height < 1:
        return 'without area'
    if min(x + width, size[1]) <= max(x, 0) or min(y + height, size[0]) <= max(y, 0):
        return 'outside their image'
    mask = ann.get('segmentation')
    if masks and isinstance(mask, list) and mask and not any(map(_is_polygon, mask)):
        return 'with a mask of fewer than three points'
    return None


def _is_polygon(points: Any) -> bool:
    return isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0


def _example(ann: dict, key: str) -> str:
    return f'annotation {ann["id"]} ({ann[key]!r})'


def _check_repeated(annotations: Sequence[dict], findings: Findings) -> None:
    """Reports objects that are listed twice, and an id that COCOeval takes for another meaning."""
    from scipy.spatial import KDTree

    objects = [ann for ann in annotations if not ann.get('iscrowd')]
    kinds = [(ann['image_id'], ann['category_id']) for ann in objects]
    numbers = {kind: 2.0 * number for number, kind in enumerate({*kinds})}
    # Boxes of other images and categories are 2 apart.
    points = np.array([[numbers[k], *a['bbox']] for k, a in zip(kinds, objects, strict=True)])
    if len(points) > 1:
        nearest = KDTree(points).query(points, k=2, p=np.inf)[0][:, 1]
        again = nearest <= np.minimum(1, 0.1 * points[:, 3:].min(1))
        if again.any():
            findings.warn(
                f'{again.sum()} annotations have the image, category and box of another one (to a '
                'pixel): each counts twice in the loss, and only one of them can be found'
            )
    if any(ann['id'] == 0 for ann in annotations):
        findings.warn(
            'an annotation has the id 0, which COCOeval takes for "not matched": mmvttt counts '
            'from 1 instead, other programs measure too little'
        )


def _read(path: str, findings: Findings, training: bool) -> dict[str, list] | None:
    """The content of a file, or None if it is wrong, or too large for a quick check."""
    if not os.path.isfile(path):
        findings.error(f'ann_file {path!r} is not a file: set it to the JSON of the annotations')
        return None
    if not findings.thorough and os.path.getsize(path) > LARGEST:
        return None
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


def coco_entries(
    content: dict[str, list], findings: Findings
) -> tuple[list[dict], list[dict], list[dict]]:
    """The images, annotations and categories whose values are allowed; the others are findings.

    So are annotations whose image or category is not listed, which mmdet drops.
    """
    images, annotations, categories = (_whole(content, part, findings) for part in _ENTRIES)
    lists = dict(image_id=images, category_id=categories)
    ids = {key: {entry['id'] for entry in entries} for key, entries in lists.items()}
    faults = [next((k for k in ids if ann[k] not in ids[k]), None) for ann in annotations]
    listed = [ann for ann, key in zip(annotations, faults, strict=True) if key is None]
    for ann, key in zip(annotations, faults, strict=True):
        if key is not None:
            (findings.warn if listed else findings.error)(
                f'annotations whose {key} is not listed (a text is not a number)',
                _example(ann, key),
            )
    check_fractions(listed, findings)
    return images, listed, categories


def check_fractions(annotations: Sequence[dict], findings: Findings) -> None:
    """Reports boxes none of which is larger than a pixel."""
    if annotations and all(min(a['bbox']) >= 0 and max(a['bbox']) <= 1 for a in annotations):
        findings.error(
            'the boxes are fractions of the picture (all numbers lie between 0 and 1): multiply '
            'them, and the outlines, by its width and height'
        )


def wrong_key(part: str, entry: Mapping[str, Any]) -> str | None:
    """The first key of an entry of 'images', … whose value is not allowed, or None."""
    for key, (_, is_allowed) in _ENTRIES[part].items():
        if not is_allowed(entry.get(key)):
            return key
    return None


def _whole(content: dict[str, list], part: str, findings: Findings) -> list[dict]:
    """The entries whose values are allowed; the others, and duplicates, are errors."""
    whole = []
    for number, item in enumerate(content[part]):
        entry = item if isinstance(item, dict) else {}
        if (key := wrong_key(part, entry)) is None:
            whole.append(entry)
            continue
        name = f'id {entry["id"]!r}' if is_id(entry.get('id')) else f'number {number}'
        findings.error(
            f'{part} whose {key} is missing or not {_ENTRIES[part][key][0]}',
            f'{name} ({entry.get(key)!r:.80})',
        )
    for key in dict(images=('id', 'file_name'), categories=('id', 'name')).get(part, ('id',)):
        for value, count in Counter(entry[key] for entry in whole).items():
            if count > 1:
                # Some sets list a picture once for each caption.
                report = findings.warn if key == 'file_name' else findings.error
                report(f'{key}s of several {part}', repr(value))
    return whole


def _check_categories(
    names: Sequence[str], classes: Sequence[str], path: str, findings: Findings
) -> None:
    """Compares the categories with the classes: mmdet matches names, and drops other categories."""
    matched = tuple(name for name in names if name in classes)
    if not matched:
        findings.error(
            f'no class of metainfo is a category of {path}, so that every box would be dropped: '
            f'the classes are {listed(classes)}, the categories {listed(names)}; '
            f"set metainfo=dict(classes={tuple(names)}), and the heads' num_classes"
        )
        return
    findings.classes = matched
    if dropped := [name for name in names if name not in classes]:
        findings.warn(
            f'categories that are dropped, because they are no class of metainfo: {listed(dropped)}'
        )
    if matched != tuple(classes):
        findings.warn(
            'labels follow the order of categories in the file, but pictures get the names in '
            f'metainfo: write classes={matched}'
        )


def runs_of(mask: Mapping[str, Any], size: tuple[int, int]) -> list[int] | None:
    """The runs of a mask in RLE, or None if it does not fill its image of (height, width).

    pycocotools reads what is too short without an error. A number of compressed RLE has five bits a
    character, the lowest first, of which a sixth says whether more follow; from the fourth on, it
    is the difference from the run two before.
    """
    runs = mask.get('counts')
    if isinstance(runs, str):
        text, runs = runs, []
        for number in re.findall('[P-o]*[0-O]', text):
            codes = [ord(character) - 48 & 31 for character in number]
            value = sum(code << 5 * place for place, code in enumerate(codes))
            value -= (codes[-1] >> 4) << 5 * len(codes)
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        runs = runs if re.fullmatch('([P-o]*[0-O])*', text) else None
    fills = (
        isinstance(runs, list)
        and all(type(n) is int and n >= 0 for n in runs)
        and sum(runs) == size[0] * size[1]
        and mask.get('size') == list(size)
    )
    return runs if fills else None


def check_conventions(
    annotations: Sequence[dict], sizes: Sizes, findings: Findings, reason: str = _CONVENTION
) -> None:
    """Reports boxes that are not around their mask, or without one reach beyond their image.

    It is an error if most are, or if all boxes without a mask would fit as corners. The `reason` is
    why that may be.
    """
    masked: list[tuple[dict, bool]] = []
    bare: list[tuple[dict, bool]] = []
    for ann in annotations:
        size, (x, y, width, height) = sizes[ann['image_id']], ann['bbox']
        if (around := _is_around(ann, size, findings.thorough)) is not None:
            masked.append((ann, around))
        elif min(width, height) > 0:
            bare.append((ann, _fits((x, y, x + width, y + height), size)))
    corners = all(_fits(ann['bbox'], sizes[ann['image_id']]) for ann, _ in bare)
    for place, pairs, most in (
        ('are not around their mask', masked, 0.5),
        ('reach beyond their image', bare, 0.1 if corners else 0.5),
    ):
        wrong = [_example(ann, 'bbox') for ann, right in pairs if not right]
        for example in wrong:
            (findings.error if len(wrong) > most * len(pairs) else findings.warn)(
                f'boxes that {place}: {reason}', example
            )


def _fits(corners: Sequence[float], size: tuple[int, int], slack: int = 2) -> bool:
    left, top, right, bottom = corners
    inside = max(right - size[1], bottom - size[0], -left, -top) <= slack
    return inside and left < right and top < bottom


def _is_around(ann: dict, size: tuple[int, int], rle: bool) -> bool | None:
    """Whether a box is around its mask; None if it has none."""
    x, y, width, height = ann['bbox']
    bounds = _bounds(ann.get('segmentation'), size, rle)
    if bounds is None or min(width, height) <= 0:
        return None
    left, top, right, bottom = bounds
    box = x, y, x + width, y + height
    # Boxes may be larger than what is visible, and cut off a little of it.
    slack = 2 + 0.1 * max(right - left, bottom - top)
    if _near(box, bounds, slack):
        return True
    outside = max(x - left, y - top, right - box[2], bottom - box[3])
    shared = max(0, min(box[2], right) - max(x, left)) * max(0, min(box[3], bottom) - max(y, top))
    union = width * height + (right - left) * (bottom - top) - shared
    return outside <= slack and shared > 0.3 * union and not _near(ann['bbox'], bounds, slack)


def _near(one: Sequence[float], other: Sequence[float], slack: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) <= slack


def _bounds(mask: Any, size: tuple[int, int], rle: bool) -> tuple[float, ...] | None:
    """(x1, y1, x2, y2) of polygons, or if asked for, of a mask in RLE; None if it has none."""
    if isinstance(mask, list):
        if not mask or not all(map(_is_polygon, mask)):
            return None
        xs, ys = ([n for polygon in mask for n in polygon[k::2]] for k in (0, 1))
        return min(xs), min(ys), max(xs), max(ys)
    runs = runs_of(mask, size) if rle and isinstance(mask, dict) else None
    if runs is None:
        return None
    from pycocotools.mask import frPyObjects, toBbox

    left, top, width, height = toBbox(frPyObjects(dict(size=size, counts=runs), *size)).tolist()
    return (left, top, left + width, top + height) if width else None
