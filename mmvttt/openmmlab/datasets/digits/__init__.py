"""The built-in instance-segmentation set: real handwritten digits on real photographs, COCO format.

Made once from data in scikit-learn's and scikit-image's wheels; seeded, cached, and written
atomically.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmvttt.errors import OptionError, UsageError

from ...data.write_coco import coco_json, coco_object

CLASSES = tuple('0123456789')
SPLITS = ('train', 'val')
# Increased when the same parameters give other images or annotations.
RECIPE = 1
MARKER = 'mmvttt_digits.json'
# Part of the digits, and of each photograph's longer side, that is kept for val.
VAL_DIGITS = 0.2
VAL_REGION = 0.3
# A digit's side, as part of the image's; digits on an image; tries to place one before giving up.
SIDES = (0.2, 0.4)
COUNTS = (1, 4)
TRIES = 20
# Ink above this is the digit; the rest of its square stays photograph.
INK = 0.35
# Least distance between the pen's colour and the mean of what it covers, of 441 at most.
CONTRAST = 120.0


class Region(NamedTuple):
    """A rectangle of one photograph, in pixels."""

    photo: str
    left: int
    top: int
    width: int
    height: int


class Digit(NamedTuple):
    """One handwritten digit: row in scikit-learn's set, class, and `(8, 8)` ink in [0, 1]."""

    row: int
    label: int
    ink: np.ndarray


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
    digits = _split_digits(load_digits(), dealing)
    regions = _split_photos(photos, size, dealing)
    (root / 'annotations').mkdir(parents=True)
    for split, rng in zip(SPLITS, streams, strict=True):
        (root / split).mkdir()
        pictures = []
        for number in range(counts[split]):
            region = regions[split][rng.integers(len(regions[split]))]
            left = region.left + int(rng.integers(region.width - size + 1))
            top = region.top + int(rng.integers(region.height - size + 1))
            pixels = photos[region.photo][top : top + size, left : left + size].copy()
            name = f'{number:06}.png'
            background = {'photo': region.photo, 'crop': (left, top, size, size)}
            image = dict(file_name=name, height=size, width=size, background=background)
            objects = [
                coco_object(CLASSES[digit.label], mask) | {'digit': digit.row}
                for digit, mask in _paste(pixels, digits[split], rng)
            ]
            pictures.append((image, objects))
            Image.fromarray(pixels).save(root / split / name, compress_level=3)
        path = root / 'annotations' / f'instances_{split}.json'
        path.write_text(coco_json(CLASSES, pictures))


def load_photos() -> dict[str, np.ndarray]:
    """Photographs as `(H, W, 3)` uint8 RGB, which the wheels themselves hold: no download."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    ours = ('astronaut', 'camera', 'chelsea', 'coffee', 'rocket')
    photos = {name: getattr(data, name)() for name in ours}
    photos |= {name: load_sample_image(f'{name}.jpg') for name in ('china', 'flower')}
    photos['motorcycle'] = data.stereo_motorcycle()[0]
    photos['camera'] = np.repeat(photos['camera'][..., None], 3, axis=2)
    # The random numbers of the set follow this order.
    return {name: np.asarray(photos[name], np.uint8) for name in sorted(photos)}


def load_digits() -> list[Digit]:
    """The 1797 handwritten digits of scikit-learn (UCI's optical recognition test set)."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    pairs = zip(bunch.images, bunch.target, strict=True)
    return [Digit(i, int(label), ink / 16) for i, (ink, label) in enumerate(pairs)]


def _split_digits(digits: list[Digit], rng: np.random.Generator) -> dict[str, list[Digit]]:
    """Deals every digit to train or val, class by class, so that val holds each class alike."""
    parts: dict[str, list[Digit]] = {split: [] for split in SPLITS}
    for label in range(len(CLASSES)):
        of_class = [d for d in digits if d.label == label]
        order = rng.permutation(len(of_class))
        num_val = round(VAL_DIGITS * len(of_class))
        parts['val'] += [of_class[i] for i in order[:num_val]]
        parts['train'] += [of_class[i] for i in order[num_val:]]
    return parts


def _split_photos(
    photos: dict[str, np.ndarray], size: int, rng: np.random.Generator
) -> dict[str, list[Region]]:
    """Cuts every photograph across its longer side: val gets one end, train all the rest.

    Both parts must hold a crop of `size` × `size` pixels; a ValueError if one is too small.
    """
    # Both parts of the smallest photograph hold a crop.
    largest = min(min(min(p.shape[:2]), max(p.shape[:2]) // 2) for p in photos.values())
    if size > largest:
        raise OptionError(
            f'size={size}: the photographs hold disjoint train and val crops of at most '
            f'{largest} px; pass a size of at most {largest}'
        )
    parts: dict[str, list[Region]] = {split: [] for split in SPLITS}
    for name, photo in photos.items():
        height, width = photo.shape[:2]
        long_side = max(height, width)
        val = max(size, round(VAL_REGION * long_side))
        train = long_side - val
        spans = {'val': (0, val), 'train': (val, train)}
        if rng.random() < 0.5:
            spans = {'train': (0, train), 'val': (train, val)}
        for split, (start, extent) in spans.items():
            box = (start, 0, extent, height) if width >= height else (0, start, width, extent)
            parts[split].append(Region(name, *box))
    return parts


def _paste(
    image: np.ndarray, digits: list[Digit], rng: np.random.Generator
) -> list[tuple[Digit, np.ndarray]]:
    """Draws digits into an image `(S, S, 3)`; each with the mask `(S, S)` of what it covers.

    Digits never overlap, so that every mask is whole.
    """
    size = len(image)
    taken = np.zeros((size, size), dtype=bool)
    pastes: list[tuple[Digit, np.ndarray]] = []
    for _ in range(rng.integers(COUNTS[0], COUNTS[1] + 1)):
        digit = digits[rng.integers(len(digits))]
        side = round(size * rng.uniform(*SIDES))
        ink = _enlarge(digit.ink, side)
        for _ in range(TRIES):
            top, left = rng.integers(0, size - side + 1, 2)
            mask = np.zeros_like(taken)
            mask[top : top + side, left : left + side] = ink > INK
            if (mask & taken).any():
                continue
            taken |= mask
            # A colour that stands out from the pixels that it covers.
            pen, mean = rng.uniform(0, 255, 3), image[mask].mean(axis=0)
            while np.linalg.norm(pen - mean) < CONTRAST:
                pen = rng.uniform(0, 255, 3)
            # Thin ink is a little darker: what the pen left, not a stencil.
            shade = 0.75 + 0.25 * ink[ink > INK]
            image[mask] = np.round(shade[:, None] * pen).astype(np.uint8)
            pastes.append((digit, mask))
            break
    return pastes


def _enlarge(ink: np.ndarray, side: int) -> np.ndarray:
    """`(8, 8)` ink as `(side, side)`, smooth."""
    image = Image.fromarray(ink.astype(np.float32))
    return np.clip(np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)), 0, 1)
