"""Writes the JSON of COCO."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def coco_json(classes: Sequence[str], pictures: Iterable[tuple[dict, Sequence[dict]]]) -> str:
    """The text of a file, from the entries of each image and of its objects.

    In an object 'category' is the name of its class. Entries without an id are numbered from 1.
    """
    numbers = {name: number for number, name in enumerate(classes, 1)}
    images: list[dict] = []
    annotations: list[dict] = []
    for entry, objects in pictures:
        images.append({'id': len(images) + 1} | entry)
        for item in objects:
            values = dict(item, image_id=images[-1]['id'])
            values['category_id'] = numbers[values.pop('category')]
            annotations.append({'id': len(annotations) + 1} | values)
    categories = [dict(id=number, name=name) for name, number in numbers.items()]
    return json.dumps(dict(images=images, annotations=annotations, categories=categories))


def coco_box(
    category: str, left: float, top: float, right: float, bottom: float, **more: Any
) -> dict[str, Any]:
    """The entry of an object with a box, see `coco_json`."""
    box = [left, top, right - left, bottom - top]
    return dict(category=category, bbox=box, area=box[2] * box[3], iscrowd=0, **more)


def coco_object(category: str, mask: np.ndarray) -> dict[str, Any]:
    """The entry of an object with a mask `(H, W)`, see `coco_json`."""
    from pycocotools.mask import area, encode, toBbox

    code = encode(np.asfortranarray(mask, np.uint8))
    return dict(
        category=category,
        iscrowd=0,
        area=int(area(code)),
        bbox=toBbox(code).tolist(),
        segmentation=dict(size=code['size'], counts=code['counts'].decode()),
    )
