"""Sources of the digits and photographs of the built-in set, and their split into train and val."""

from dataclasses import dataclass

import numpy as np

from mmvttt.errors import OptionError

CLASSES = tuple('0123456789')
SPLITS = ('train', 'val')

# Part of the digits, and of each photograph's longer side, that is kept for val.
VAL_DIGITS = 0.2
VAL_REGION = 0.3


@dataclass(frozen=True)
class Region:
    """A rectangle `(left, top, width, height)`, in pixels, of one photograph."""

    photo: str
    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Digit:
    """One handwritten digit: row in scikit-learn's set, class, and `(8, 8)` ink in [0, 1]."""

    index: int
    label: int
    ink: np.ndarray


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
    return [
        Digit(i, int(label), ink / 16)
        for i, (ink, label) in enumerate(zip(bunch.images, bunch.target, strict=True))
    ]


def split_digits(digits: list[Digit], rng: np.random.Generator) -> dict[str, list[Digit]]:
    """Deals every digit to train or val, class by class, so that val holds each class alike."""
    parts: dict[str, list[Digit]] = {split: [] for split in SPLITS}
    for label in range(len(CLASSES)):
        of_class = [d for d in digits if d.label == label]
        order = rng.permutation(len(of_class))
        num_val = round(VAL_DIGITS * len(of_class))
        parts['val'] += [of_class[i] for i in order[:num_val]]
        parts['train'] += [of_class[i] for i in order[num_val:]]
    return parts


def split_photos(
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
