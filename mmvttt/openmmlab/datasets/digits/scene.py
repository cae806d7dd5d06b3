"""Composes one image of the built-in set: handwritten digits pasted on a crop of a photograph."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from .sources import Digit, Region

# A digit's side, as part of the image's; digits on an image; tries to place one before giving up.
SIDES = (0.2, 0.4)
COUNTS = (1, 4)
TRIES = 20
# Ink above this is the digit; the rest of its square stays photograph.
INK = 0.35
# Least distance between the pen's colour and the mean of what it covers, of 441 at most.
CONTRAST = 120.0


@dataclass(frozen=True)
class Paste:
    """One digit on an image; its `mask` `(S, S)` holds exactly the pixels that it covers."""

    digit: Digit
    mask: np.ndarray


@dataclass(frozen=True)
class Scene:
    """An image `(S, S, 3)` uint8 RGB, the digits on it, and where its background was cut."""

    image: np.ndarray
    pastes: list[Paste]
    background: Region


def compose(
    photos: dict[str, np.ndarray],
    regions: list[Region],
    digits: list[Digit],
    size: int,
    rng: np.random.Generator,
) -> Scene:
    """Draws a scene of `size` × `size` pixels. Digits never overlap, so that every mask is whole.

    `regions` are the parts of photographs that may be background; each holds a crop.
    """
    background = _crop(regions, size, rng)
    photo, (top, left) = photos[background.photo], (background.top, background.left)
    image = photo[top : top + size, left : left + size].copy()
    taken = np.zeros((size, size), dtype=bool)
    pastes: list[Paste] = []
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
            pen = _pen(image[mask], rng)
            # Thin ink is a little darker: what the pen left, not a stencil.
            shade = 0.75 + 0.25 * ink[ink > INK]
            image[mask] = np.round(shade[:, None] * pen).astype(np.uint8)
            pastes.append(Paste(digit, mask))
            break
    return Scene(image, pastes, background)


def _crop(regions: list[Region], size: int, rng: np.random.Generator) -> Region:
    region = regions[rng.integers(len(regions))]
    left = region.left + int(rng.integers(region.width - size + 1))
    top = region.top + int(rng.integers(region.height - size + 1))
    return Region(region.photo, left, top, size, size)


def _enlarge(ink: np.ndarray, side: int) -> np.ndarray:
    """`(8, 8)` ink as `(side, side)`, smooth."""
    image = Image.fromarray(ink.astype(np.float32))
    return np.clip(np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)), 0, 1)


def _pen(covered: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random RGB colour that stands out from the pixels `(N, 3)` it will cover."""
    mean = covered.mean(axis=0)
    while True:
        pen = rng.uniform(0, 255, 3)
        if np.linalg.norm(pen - mean) >= CONTRAST:
            return pen
