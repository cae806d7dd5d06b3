"""The built-in instance-segmentation set: real handwritten digits on real photographs, COCO format.

Made once from data in scikit-learn's and scikit-image's wheels; seeded, cached, and written
atomically.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from mmvttt.arguments import check_int
from mmvttt.errors import UsageError

from .scene import Scene, compose
from .sources import CLASSES, SPLITS, load_digits, load_photos, split_digits, split_photos

__all__ = ['CLASSES', 'make_digits']

# Increased when the same parameters give other images or annotations.
RECIPE = 1
MARKER = 'mmvttt_digits.json'
MIN_SIZE = 32


def make_digits(
    root: str | os.PathLike[str],
    num_train: int = 600,
    num_val: int = 100,
    size: int = 160,
    seed: int = 0,
) -> Path:
    """Makes the set under `root`, unless it exists already.

    Layout: `{train,val}/000000.png` and `annotations/instances_{train,val}.json`, with a category
    for each digit, ids 1 to 10. Images carry `background` (photograph and crop), annotations carry
    `digit` (row in scikit-learn's set). val shares neither a digit's instance nor a pixel of
    background with train.

    Args:
        root: the folder to make. It appears in one step when all is written; a UsageError if there
            is another one.
        num_train, num_val: images of the two splits.
        size: side of the square images, in pixels.
        seed: seed of all random numbers.
    """
    root = Path(root)
    check_int('num_train', num_train)
    check_int('num_val', num_val)
    check_int('size', size, MIN_SIZE)
    check_int('seed', seed, 0)
    mark = dict(recipe=RECIPE, num_train=num_train, num_val=num_val, size=size, seed=seed)
    marker = root / MARKER
    if marker.is_file() and json.loads(marker.read_text()) == mark:
        return root
    if root.is_file() or (root.is_dir() and any(root.iterdir())):
        raise UsageError(
            f'{root} is there, and it is not this set: move it away or choose another root'
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that the rename stays inside one file system.
    with tempfile.TemporaryDirectory(prefix=f'.{root.name}-', dir=root.parent) as scratch:
        new = Path(scratch) / 'new'
        _build(new, {'train': num_train, 'val': num_val}, size, seed)
        (new / MARKER).write_text(json.dumps(mark, indent=1))
        new.rename(root)
    return root


def _build(root: Path, counts: dict[str, int], size: int, seed: int) -> None:
    photos = load_photos()
    # One random stream for each purpose, so that val does not depend on the training images.
    dealing, *streams = np.random.default_rng(seed).spawn(1 + len(SPLITS))
    digits = split_digits(load_digits(), dealing)
    regions = split_photos(photos, size, dealing)
    (root / 'annotations').mkdir(parents=True)
    for split, rng in zip(SPLITS, streams, strict=True):
        (root / split).mkdir()
        scenes = []
        for number in range(counts[split]):
            scene = compose(photos, regions[split], digits[split], size, rng)
            Image.fromarray(scene.image).save(root / split / f'{number:06}.png', compress_level=3)
            scenes.append(scene)
        path = root / 'annotations' / f'instances_{split}.json'
        path.write_text(json.dumps(_coco(scenes)))


def _coco(scenes: list[Scene]) -> dict:
    images: list[dict] = []
    annotations: list[dict] = []
    for image_id, scene in enumerate(scenes, start=1):
        height, width = scene.image.shape[:2]
        at = scene.background
        background = dict(photo=at.photo, crop=[at.left, at.top, at.width, at.height])
        name = f'{image_id - 1:06}.png'
        images.append(
            dict(id=image_id, file_name=name, height=height, width=width, background=background)
        )
        for paste in scene.pastes:
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=image_id,
                    category_id=paste.digit.label + 1,
                    iscrowd=0,
                    area=int(paste.mask.sum()),
                    bbox=_box(paste.mask),
                    segmentation=_rle(paste.mask),
                    digit=paste.digit.index,
                )
            )
    categories = [{'id': i + 1, 'name': name} for i, name in enumerate(CLASSES)]
    return {'images': images, 'annotations': annotations, 'categories': categories}


def _box(mask: np.ndarray) -> list[int]:
    """COCO's `[x, y, width, height]` of a mask `(H, W)`, in pixels."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, left = int(rows[0]), int(columns[0])
    return [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]


def _rle(mask: np.ndarray) -> dict:
    """COCO's uncompressed run lengths of a mask `(H, W)`: down the columns, first run of zeros."""
    flat = mask.ravel(order='F')
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    return {'size': list(mask.shape), 'counts': [0, *runs] if flat[0] else runs}
