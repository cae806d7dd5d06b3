"""COCO's JSON: categories against classes, and what mmdet drops, ignores or stumbles over."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .findings import Findings, Scope
from .images import check_images

# A larger file is not parsed before a training: 50 MB take a second, COCO's train2017 ten.
LARGEST = 50 * 2**20
_PARTS = ('images', 'annotations', 'categories')
_IMAGE_KEYS = {'id', 'file_name', 'height', 'width'}
_BOX_KEYS = {'image_id', 'category_id', 'bbox', 'area'}
# Pixels that a box may reach over the border, by rounding.
_SLACK = 1.0
# pycocotools counts the points of a line in 32 bits, five to a pixel.
_FARTHEST = 1e6


def check_coco(
    path: str,
    image_folder: str,
    classes: Sequence[str],
    findings: Findings,
    scope: Scope,
    *,
    training: bool,
    masks: bool,
) -> None:
    """Checks an annotation file; if not thorough, categories and what a training would not say.

    Args:
        path: The JSON.
        image_folder: Where its images are.
        classes: The data set's, in the order of the config.
        findings: Where problems go.
        scope: How much to look at.
        training: Whether it is an error that there is no box.
        masks: Whether masks are loaded.
    """
    if not scope.thorough and os.path.getsize(path) > LARGEST:
        return
    content = _read(path, findings, training)
    if content is None:
        return
    _check_categories(content['categories'], classes, path, findings)
    findings.summary = (
        f'{len(content["images"])} images, {len(content["annotations"])} annotations, '
        f'{len(content["categories"])} categories in {path}'
    )
    if not any(_usable(content, findings.classes or ())):
        (findings.error if training else findings.warn)(
            f'{path} has no box to learn or to find: every annotation is of another category, a '
            'crowd, without area, or outside of its image'
        )
    named = [i for i in content['images'] if isinstance(i, dict) and 'file_name' in i]
    paths = [os.path.join(image_folder, str(image['file_name'])) for image in named]
    sizes: dict[Any, tuple[int, int]] = {}
    if scope.thorough:
        sizes = _check_image_list(content['images'], findings)
        _check_annotations(content, sizes, findings, masks)
    else:
        for number, ann in enumerate(content['annotations']):
            if isinstance(ann, dict):
                _check_values(ann, _name(ann, number), findings, masks)
    noted = [sizes.get(_hashable(image.get('id'))) for image in named]
    check_images(zip(paths, noted, strict=True), findings, scope)


def _read(path: str, findings: Findings, training: bool) -> dict[str, list] | None:
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        findings.error(
            f'{path} is no JSON, or not all of it is there ({error}); download or write it again'
        )
        return None
    parts = content if isinstance(content, dict) else {}
    if parts and not training:
        # A test set of which the annotations are kept secret.
        parts.setdefault('annotations', [])
    wrong = [part for part in _PARTS if not isinstance(parts.get(part), list)]
    if wrong:
        found = ', '.join(map(repr, parts)) or f'a {type(content).__name__}'
        findings.error(
            f'{path} has no list {" and no list ".join(wrong)}, but {found}: it is not in the '
            "format of COCO's instances, see docs/own_data.md"
        )
        return None
    return content


def _check_categories(
    categories: list, classes: Sequence[str], path: str, findings: Findings
) -> None:
    """Which categories the classes stand for: mmdet matches names, and drops the others."""
    named = []
    for category in categories:
        if not isinstance(category, dict) or not {'id', 'name'}.issubset(category):
            findings.count_error('categories without id or name', category)
        elif not _is_id(category['id']) or not isinstance(category['name'], str):
            findings.count_error('categories whose id or name is of another type', category)
        else:
            named.append(category)
    names = [category['name'] for category in named]
    for name in _repeated(names):
        findings.count_error('names of several categories', repr(name))
    for number in _repeated([category['id'] for category in named]):
        findings.count_error('ids of several categories', number)
    matched = tuple(name for name in names if name in classes)
    if not matched:
        findings.error(
            f'no class of metainfo is a category of {path}, so that every box would be dropped: '
            f'the classes are {_listed(classes)}, the categories {_listed(names)}; set '
            f'metainfo=dict(classes={tuple(names)[:3]!r}{", …" if len(names) > 3 else ""}), and '
            "the heads' num_classes"
        )
        return
    findings.classes = matched
    absent = [name for name in classes if name not in names]
    if absent:
        findings.warn(f'classes of metainfo that are no category of {path}: {_listed(absent)}')
    dropped = [name for name in names if name not in classes]
    if dropped:
        findings.warn(
            f'categories that are left out, being no class of metainfo: {_listed(dropped)}'
        )
    if matched != tuple(classes):
        findings.warn(
            'labels follow the order of the categories in the file, not that of metainfo, whose '
            f'names the pictures get: write classes=({_listed(matched)})'
        )


def _category_ids(content: dict[str, list], names: Sequence[str] | None = None) -> set:
    """The ids of the categories, or of those with certain names."""
    named = [c for c in content['categories'] if isinstance(c, dict)]
    return {_hashable(c.get('id')) for c in named if names is None or c.get('name') in names}


def _usable(content: dict[str, list], names: Sequence[str]) -> Iterator[bool]:
    """For each annotation, whether mmdet would learn it."""
    wanted = _category_ids(content, names)
    images = [image for image in content['images'] if isinstance(image, dict)]
    sizes = {_hashable(image.get('id')): _size(image) for image in images}
    for ann in content['annotations']:
        if isinstance(ann, dict) and _BOX_KEYS.issubset(ann):
            box, size = _box(ann['bbox']), sizes.get(_hashable(ann['image_id']))
            yield (
                box is not None
                and size is not None
                and _hashable(ann['category_id']) in wanted
                and not ann.get('iscrowd')
                and not ann.get('ignore')
                and _fault(box, ann['area'], size) is None
            )


def _check_image_list(images: list, findings: Findings) -> dict[Any, tuple[int, int]]:
    """The size of every image by its id."""
    sizes: dict[Any, tuple[int, int]] = {}
    whole = []
    for number, image in enumerate(images):
        if not isinstance(image, dict) or not _IMAGE_KEYS.issubset(image):
            findings.count_error(
                'images without id, file_name, height or width', f'number {number}'
            )
            continue
        whole.append(image)
        if not _is_id(image['id']) or not isinstance(image['file_name'], str):
            findings.count_error(
                'images whose id or file_name is of another type', f'number {number}'
            )
        size = _size(image)
        if size is None:
            findings.count_error('images of impossible height or width', image['file_name'])
        else:
            sizes[_hashable(image['id'])] = size
    for key in _repeated([image['id'] for image in whole]):
        findings.count_error('ids of several images', key)
    for name in _repeated([image['file_name'] for image in whole]):
        findings.count_warning('files that are listed several times', name)
    return sizes


def _check_annotations(
    content: dict[str, list],
    sizes: dict[Any, tuple[int, int]],
    findings: Findings,
    masks: bool,
) -> None:
    listed, wanted = _category_ids(content), _category_ids(content, findings.classes or ())
    ids = []
    empty = set(sizes)
    for number, ann in enumerate(content['annotations']):
        missing = sorted(_BOX_KEYS - ann.keys() if isinstance(ann, dict) else _BOX_KEYS)
        if missing:
            findings.count_error(f'annotations without {missing[0]}', f'number {number}')
            continue
        name = _name(ann, number)
        if 'id' in ann:
            ids.append(ann['id'])
        else:
            findings.count_error('annotations without id', f'number {number}')
        if not _is_id(ann.get('id', 0)):
            findings.count_error('annotations whose id is no number', name)
        key, category = _hashable(ann['image_id']), _hashable(ann['category_id'])
        if key not in sizes:
            findings.count_error('annotations of an image that is not listed', f'{name} ({key})')
        elif category not in listed:
            findings.count_error(
                'annotations of a category that is not listed', f'{name} (category {category})'
            )
        elif _check_values(ann, name, findings, masks):
            fault = _fault(ann['bbox'], ann['area'], sizes[key])
            if fault is not None:
                findings.count_warning(fault, f'{name} {ann["bbox"]}')
                continue
            if category in wanted:
                empty.discard(key)
            (x, y, width, height), (bottom, right) = ann['bbox'], sizes[key]
            over = max(-x, -y, x + width - right, y + height - bottom)
            if over > _SLACK:
                findings.count_warning(
                    'boxes that reach over the border of their image', f'{name} (by {over:g})'
                )
            if masks and not ann.get('ignore'):
                _check_mask(ann.get('segmentation'), sizes[key], name, findings)
    for repeated in _repeated(ids):
        findings.count_error('ids of several annotations', repeated)
    for image in content['images']:
        if isinstance(image, dict) and _hashable(image.get('id')) in empty:
            findings.count_warning('images without a box', image.get('file_name'))


def _check_values(ann: dict, name: str, findings: Findings, masks: bool) -> bool:
    """Faults that a training hides: it drops the box, learns NaN, or crashes without a message.

    Returns:
        Whether box and area are numbers.
    """
    whole = _box(ann.get('bbox', [0] * 4)) is not None and _number(ann.get('area', 0))
    if not whole:
        findings.count_error('boxes that are not four numbers, or areas that are none', name)
    for flag in ('iscrowd', 'ignore'):
        if ann.get(flag, 0) not in (0, 1) or isinstance(ann.get(flag), str | float):
            findings.count_error(f'annotations whose {flag} is neither 0 nor 1', name)
    mask = ann.get('segmentation')
    problem = _no_polygons(mask) if masks and isinstance(mask, list) else None
    if problem:
        findings.count_error(problem, name)
    return whole


def _no_polygons(mask: list) -> str | None:
    """The fault of the numbers in a list of polygons, as a plural."""
    if not all(isinstance(polygon, list) for polygon in mask):
        return 'masks that are neither polygons nor RLE'
    if not all(_number(n) for polygon in mask for n in polygon):
        return 'polygons with something else than numbers'
    if any(polygon and max(max(polygon), -min(polygon)) > _FARTHEST for polygon in mask):
        return 'polygons with points too far away, where pycocotools crashes'
    return None


def _fault(box: Sequence[float], area: Any, size: tuple[int, int]) -> str | None:
    """Reason for which mmdet drops a box `(x, y, width, height)` of an image (height, width)."""
    x, y, width, height = box
    if not _number(area) or area <= 0 or width < 1 or height < 1:
        return 'boxes of no area, or thinner than a pixel, which are dropped'
    if min(x + width, size[1]) <= max(x, 0) or min(y + height, size[0]) <= max(y, 0):
        return 'boxes outside of their image, which are dropped'
    return None


def _check_mask(mask: Any, size: tuple[int, int], name: str, findings: Findings) -> None:
    """Masks that `_no_polygons` leaves and that are missing, no masks, or of another size."""
    if not mask:
        findings.count_error('boxes without a mask, where masks are loaded', name)
    elif isinstance(mask, dict):
        counts = mask.get('counts')
        if mask.get('size') != list(size):
            findings.count_error('masks (RLE) of another size than the image', name)
        elif not isinstance(counts, str) and not _fills(counts, size):
            findings.count_error('masks (RLE) whose run lengths do not add up to the image', name)
    elif not isinstance(mask, list):
        findings.count_error('masks that are neither polygons nor RLE', name)
    elif _no_polygons(mask) is None:
        whole = [p for p in mask if len(p) >= 6 and len(p) % 2 == 0]
        if not whole:
            findings.count_warning(
                'boxes whose polygons have fewer than three points, which are ignored', name
            )
        elif not any(
            max(p[::2]) > 0 < max(p[1::2]) and min(p[::2]) < size[1] and min(p[1::2]) < size[0]
            for p in whole
        ):
            findings.count_warning('masks outside of their image', name)


def _fills(runs: Any, size: tuple[int, int]) -> bool:
    whole = isinstance(runs, list) and all(type(n) is int and n >= 0 for n in runs)
    return whole and sum(runs) == size[0] * size[1]


def _name(ann: dict, number: int) -> str:
    return f'annotation {ann.get("id", f"number {number}")}'


def _number(value: Any) -> bool:
    # An integer of JSON may be larger than any float.
    return type(value) in (int, float) and abs(value) < 1e308


def _box(value: Any) -> list[float] | None:
    whole = isinstance(value, list) and len(value) == 4 and all(map(_number, value))
    return value if whole else None


def _size(image: dict) -> tuple[int, int] | None:
    size: Any = (image.get('height'), image.get('width'))
    return size if all(type(side) is int and side > 0 for side in size) else None


def _is_id(value: Any) -> bool:
    return type(value) in (int, str)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, int | str | float | None) else repr(key)


def _repeated(items: list) -> list:
    return [item for item, count in Counter(map(_hashable, items)).items() if count > 1]


def _listed(names: Sequence) -> str:
    return ', '.join(map(repr, names[:8])) + (f', … ({len(names)})' if len(names) > 8 else '')
