"""Draws boxes, masks and label maps over images, in distinct colours and with text of one size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import get_data_path
from matplotlib.colors import hsv_to_rgb
from PIL import Image, ImageDraw, ImageFont

_TEXT, _PAD, _LINE = 14, 3, 2
# Opacity of masks and label maps, and brightness of pixels without a label.
_MASK, _MAP, _DARK = 0.45, 0.6, 0.35
Colours = Sequence[Sequence[int]]


def distinct_colours(count: int) -> list[tuple[int, int, int]]:
    """RGB colours whose hues are the golden ratio apart, in three brightnesses."""
    steps = np.arange(count)
    hues = (0.02 + steps * 0.618034) % 1
    bright = np.array([0.95, 0.72, 0.85])[steps % 3]
    colours = 255 * hsv_to_rgb(np.stack([hues, np.full(count, 0.8), bright], 1))
    return [tuple(colour) for colour in colours.round().astype(int).tolist()]


def cut_middle(name: str, length: int = 40) -> str:
    """A name of at most `length` characters; a longer one without its middle."""
    head = (length - 1) // 2
    return name if len(name) <= length else f'{name[:head]}…{name[head + 1 - length :]}'


def draw_instances(
    image: np.ndarray,
    boxes: np.ndarray,
    labels: Sequence[int],
    names: Sequence[str],
    scores: Sequence[float] | None = None,
    masks: np.ndarray | None = None,
    colours: Colours | None = None,
) -> np.ndarray:
    """Draws objects, with class and score above or below the box: a small object stays visible.

    Args:
        image: `(H, W, 3)` RGB.
        boxes: `(N, 4)`, x1, y1, x2, y2 in pixels.
        labels: Class of each box.
        names: Names of the classes.
        scores: In [0, 1], or None.
        masks: `(N, H, W)` of bool, or None.
        colours: RGB of the classes; default: `distinct_colours`.
    """
    colours = colours or distinct_colours(len(names))
    pixels = image.astype(np.float32)
    for label, mask in zip(labels, () if masks is None else masks, strict=masks is not None):
        pixels[mask] += _MASK * (np.array(colours[label]) - pixels[mask])
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for label, box in zip(labels, boxes.tolist(), strict=True):
        pen.rectangle(_ordered(box), outline=tuple(colours[label]), width=_LINE)
    # Text lies over all boxes.
    for i, (label, (x1, y1, _, y2)) in enumerate(zip(labels, boxes.tolist(), strict=True)):
        text = cut_middle(names[label], 24)
        _tag(pen, text if scores is None else f'{text} {scores[i]:.2f}', x1, (y1, y2),
             tuple(colours[label]))  # fmt: skip
    return np.asarray(picture)


def draw_label_map(
    image: np.ndarray, labels: np.ndarray, names: Sequence[str], colours: Colours | None = None
) -> np.ndarray:
    """Colours an image `(H, W, 3)` by a label map `(H, W)`; what has no class is darkened.

    The classes in the map are named below the image.
    """
    colours = colours or distinct_colours(len(names))
    there = labels < len(names)
    paint = np.asarray(colours, np.float32)[np.where(there, labels, 0)]
    mixed = image + _MAP * (paint - image)
    pixels = np.where(there[..., None], mixed, _DARK * image).round().astype(np.uint8)
    classes = np.unique(labels[there]).tolist()
    entries = [(cut_middle(names[c], 24), tuple(colours[c])) for c in classes]
    return np.concatenate([pixels, _legend(entries, image.shape[1])])


def with_title(image: np.ndarray, title: str) -> np.ndarray:
    """The image below a bar with a title, which is cut in the middle to fit."""
    font = _font()
    height, width = 2 * _PAD + _height(font), image.shape[1]
    length = len(title)
    while length > 3 and font.getlength(cut_middle(title, length)) > width - 2 * _PAD:
        length -= 1
    bar = Image.new('RGB', (width, height), 'white')
    ImageDraw.Draw(bar).text((_PAD, _PAD), cut_middle(title, length), fill='black', font=font)
    return np.concatenate([np.asarray(bar), image])


def beside(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures from left to right, filled up with white to one height."""
    height = max(map(len, pictures))
    fills = [((0, height - len(p)), (0, 0), (0, 0)) for p in pictures]
    padded = [np.pad(p, f, constant_values=255) for p, f in zip(pictures, fills, strict=True)]
    return np.concatenate(padded, 1)


def _legend(entries: Sequence[tuple[str, tuple[int, ...]]], width: int) -> np.ndarray:
    """Names in their colours, in as many rows as they need."""
    font = _font()
    height = _height(font) + 2 * _PAD
    rows, x = 0, 0.0
    spots = []
    for text, _ in entries:
        size = font.getlength(text) + 4 * _PAD
        if x and x + size > width:
            rows, x = rows + 1, 0.0
        spots.append((x, rows * (height + _PAD)))
        x += size
    bar = Image.new('RGB', (width, (rows + 1) * (height + _PAD)), 'white')
    pen = ImageDraw.Draw(bar)
    for (text, colour), (x, y) in zip(entries, spots, strict=True):
        _tag(pen, text, x, (y + height, y + height), colour)
    return np.asarray(bar)


def _tag(
    pen: ImageDraw.ImageDraw, text: str, x: float, ends: tuple[float, float], colour: Any
) -> None:
    """Text on a patch of colour above a box with `ends` (top, bottom), or below at the border."""
    font = _font()
    width, height = font.getlength(text) + 2 * _PAD, _height(font) + 2 * _PAD
    across, down = pen.im.size
    top = ends[0] - height
    if top < 0:
        top = min(ends[1], down - height)
    left = max(0.0, min(x, across - width))
    pen.rectangle((left, top, left + width, top + height), fill=colour)
    light = np.dot(colour, (0.299, 0.587, 0.114)) > 128
    pen.text((left + _PAD, top + _PAD), text, fill='black' if light else 'white', font=font)


def _ordered(box: list[float]) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = box
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


@cache
def _font() -> Any:
    # Latin, Greek and Cyrillic; Pillow's own font has Latin only.
    return ImageFont.truetype(Path(get_data_path()) / 'fonts' / 'ttf' / 'DejaVuSans.ttf', _TEXT)


def _height(font: Any) -> int:
    return sum(font.getmetrics())
