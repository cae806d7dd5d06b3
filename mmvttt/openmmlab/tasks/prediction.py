"""A prediction for one image: boxes, a label map or classes, as arrays, words, rows, a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from mmvttt.distributions import require
from mmvttt.text import one_line

from .lettering import font_for

_TOP = 5


@dataclass(frozen=True, repr=False)
class Prediction:
    """A prediction for one image; arrays are NumPy's. Printed, it is one line.

    `Prediction(…)` itself returns the kind that its arguments are of: `Boxes`, `LabelMap`, or
    `Classes`.

    Attributes:
        image: The image, `(H, W, 3)`, uint8, RGB.
        classes: Names of the classes.
        palette: A colour for each class, three integers of 0 to 255, RGB. Others are ignored.
    """

    image: np.ndarray
    classes: Sequence[str]
    palette: Any = field(default=None, kw_only=True)
    # Keys of `rows`.
    columns: ClassVar[tuple[str, ...]] = ('label', 'score')

    def __new__(cls, *args: Any, **options: Any) -> Prediction:
        if cls is Prediction:
            fields = zip(('image', 'classes', 'scores', 'labels', 'boxes'), args, strict=False)
            given = {name for name, value in (*fields, *options.items()) if value is not None}
            cls = Boxes if 'boxes' in given else LabelMap if 'labels' in given else Classes
        return super().__new__(cls)

    def rows(self) -> list[dict[str, Any]]:
        """A row of a table for each box, each class of a label map, or each likely class."""
        return [dict(zip(self.columns, row, strict=True)) for row in self._rows()]

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        raise NotImplementedError

    def to_supervision(self) -> Any:
        """supervision's `Detections`, of boxes or a label map's classes, or `Classifications`."""
        raise NotImplementedError

    def draw(self) -> np.ndarray:
        """The picture with boxes, masks and names: `(H, W, 3)`, uint8, RGB."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the drawn picture."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # A PNG of 640×480: 20 ms in place of 78.
        Image.fromarray(self.draw()).save(path, compress_level=1)

    def colours(self) -> np.ndarray:
        """A colour of each class `(C, 3)`, uint8: the data set's, or some that differ."""
        palette, shape = np.array(self.palette, object), (len(self.classes), 3)
        if palette.shape == shape and all(type(x) is int and 0 <= x < 256 for x in palette.flat):
            return palette.astype(np.uint8)
        hues = (np.arange(len(self.classes)) * 0.618 + 0.35) % 1
        colours = [np.multiply(hsv_to_rgb(h, 0.8, 0.95), 255) for h in hues]
        return np.array(colours, np.uint8).reshape(shape)


@dataclass(frozen=True, repr=False)
class Boxes(Prediction):
    """Prediction of a detector, the highest score first.

    Attributes:
        scores: `(N,)`.
        labels: Indices into `classes` `(N,)`.
        boxes: `(N, 4)`, x1, y1, x2, y2 in pixels of the image.
        masks: `(N, H, W)`, bool. None for a model without masks.
    """

    scores: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray
    masks: np.ndarray | None = None
    columns: ClassVar[tuple[str, ...]] = ('label', 'score', 'x1', 'y1', 'x2', 'y2')

    def __repr__(self) -> str:
        scores: dict[str, list[str]] = {}
        for label, score in zip(self.labels, self.scores, strict=True):
            scores.setdefault(one_line(self.classes[label]), []).append(f'{score:.2f}'.lstrip('0'))
        return (
            '; '.join(
                f'{len(s)} {name}{"s" * (len(s) > 1 and name[-1:] != "s")}: {", ".join(s)}'
                for name, s in scores.items()
            )
            or 'nothing'
        )

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for label, score, box in zip(self.labels, self.scores, self.boxes, strict=True):
            yield self.classes[label], *map(float, (score, *box))

    def to_supervision(self) -> Any:
        """supervision's `Detections`."""
        return _detections(self.classes, self.labels, self.boxes, self.masks, self.scores)

    def draw(self) -> np.ndarray:
        """The picture with masks, boxes and names: `(H, W, 3)`, uint8, RGB."""
        pixels, colours = self.image.astype(np.float32), self.colours()
        for mask, label in zip(() if self.masks is None else self.masks, self.labels, strict=False):
            pixels[mask] = 0.5 * pixels[mask] + 0.5 * colours[label]
        pen = _Pen(pixels)
        for i in reversed(range(len(self.boxes))):
            colour = tuple(colours[self.labels[i]])
            x1, y1, x2, y2 = map(float, self.boxes[i])
            corners = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
            pen.draw.rectangle(corners, outline=colour, width=max(2, pen.size // 8))
            # A label is certain.
            score = f' {self.scores[i]:.0%}' if self.scores[i] < 1 else ''
            pen.write(x1, y1, f'{self.classes[self.labels[i]]}{score}', colour)
        return np.asarray(pen.picture)


class _Ranked(Prediction):
    """Numbers of classes, the largest first."""

    digits: ClassVar[str]

    def __repr__(self) -> str:
        return '; '.join(
            f'{one_line(self.classes[i])} {x:{self.digits}}' for i, x in self._ranked()
        )

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        return ((self.classes[i], float(x)) for i, x in self._ranked())

    def draw(self) -> np.ndarray:
        """The picture with the names of the first classes: `(H, W, 3)`, uint8, RGB."""
        colours = self.colours()
        pen = _Pen(self._painted(colours))
        for row, (i, x) in enumerate(self._ranked()[:_TOP], 1):
            pen.write(0, row * 1.4 * pen.size, f'{self.classes[i]} {x:.0%}', colours[i])
        return np.asarray(pen.picture)

    def _painted(self, colours: np.ndarray) -> np.ndarray:
        return self.image

    def _ranked(self) -> list[tuple[int, float]]:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class LabelMap(_Ranked):
    """Prediction of a segmentor: `labels` `(H, W)`, indices into `classes`.

    Words, rows and pictures have the shares of the image in [0, 1].
    """

    labels: np.ndarray
    columns: ClassVar[tuple[str, ...]] = ('label', 'share')
    digits = '.1%'

    def to_supervision(self) -> Any:
        """supervision's `Detections`, one for each class that is there."""
        labels = np.unique(self.labels)
        masks = self.labels == labels[:, None, None]
        boxes = require('supervision').mask_to_xyxy(masks)
        return _detections(self.classes, labels, boxes, masks)

    def _painted(self, colours: np.ndarray) -> np.ndarray:
        return 0.5 * self.image.astype(np.float32) + 0.5 * colours[self.labels]

    def _ranked(self) -> list[tuple[int, float]]:
        shares = np.bincount(self.labels.ravel(), minlength=len(self.classes)) / self.labels.size
        return [(i, shares[i]) for i in np.argsort(-shares) if shares[i]]


@dataclass(frozen=True, repr=False)
class Classes(_Ranked):
    """Prediction of a classifier: `scores` `(C,)`. Words, rows, pictures have five."""

    scores: np.ndarray
    digits = '.3f'

    def to_supervision(self) -> Any:
        """supervision's `Classifications`."""
        order = np.argsort(-self.scores)
        return require('supervision').Classifications(order, confidence=self.scores[order])

    def _ranked(self) -> list[tuple[int, float]]:
        return [(i, self.scores[i]) for i in np.argsort(-self.scores)[:_TOP]]


class _Pen:
    """Draws on a picture of pixels `(H, W, 3)`, in letters that fit its size."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.picture = Image.fromarray(pixels.astype(np.uint8))
        self.draw = ImageDraw.Draw(self.picture)
        self.size = max(12, round(min(self.picture.size) / 30))

    def write(self, x: float, y: float, text: str, colour: Sequence[int]) -> None:
        """Writes a text above a point, or inside of the picture where that is at its edge."""
        text, font = font_for(text, self.size)
        _, top, right, _ = self.draw.textbbox((x, y), text, font, 'lb')
        x, y = max(0, x - max(0, right - self.picture.width)), y - min(0, top)
        self.draw.rectangle(self.draw.textbbox((x, y), text, font, 'lb'), tuple(colour))
        bright = np.dot(colour, (0.3, 0.6, 0.1)) > 140
        self.draw.text((x, y), text, 'black' if bright else 'white', font, 'lb')


def _detections(
    classes: Sequence[str], labels: Any, boxes: Any, masks: Any, scores: Any = None
) -> Any:
    names = np.array([classes[i] for i in labels], dtype=str)
    return require('supervision').Detections(
        np.asarray(boxes, np.float32),
        masks,
        scores,
        labels.astype(int),
        data={'class_name': names},
    )
