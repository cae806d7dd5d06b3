"""Predictions: arrays, words and a picture for one image; pictures, tables and labels for files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmvttt.analysis.tables import write_csv
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.distributions import require
from mmvttt.errors import UsageError
from mmvttt.pictures import SUFFIXES, open_image

from ..data.write_coco import coco_box, coco_json, coco_object

if TYPE_CHECKING:
    from .inference import Predictor

VIDEOS = ('.mp4', '.avi', '.mov', '.mkv', '.webm', '.m4v')
_TOP = 5


@dataclass(frozen=True, repr=False)
class Prediction:
    """The prediction for one image; arrays are NumPy's. Printed, it is one line.

    Attributes:
        image: The image, `(H, W, 3)`, uint8, RGB.
        classes: Names of the classes.
        scores: Of the boxes `(N,)`, the highest first, or of all classes `(C,)`. None for a label
            map.
        labels: Indices into `classes`: of the boxes `(N,)`, or of the pixels `(H, W)`. None for a
            classifier.
        boxes: `(N, 4)`, x1, y1, x2, y2 in pixels of the image. None for other models.
        masks: `(N, H, W)`, bool. None for a model without masks.
        palette: A colour for each class, RGB, or None.
    """

    image: np.ndarray
    classes: Sequence[str]
    scores: Any = None
    labels: Any = None
    boxes: Any = None
    masks: Any = None
    palette: Any = None

    def __repr__(self) -> str:
        if self.boxes is None:
            shape = '.1%' if self.scores is None else '.3f'
            return '; '.join(f'{self.classes[i]} {share:{shape}}' for i, share in self._shares())
        scores: dict[str, list[str]] = {}
        for label, score in zip(self.labels, self.scores, strict=True):
            scores.setdefault(self.classes[label], []).append(f'{score:.2f}'.lstrip('0'))
        return (
            '; '.join(
                f'{len(s)} {name}{"s" * (len(s) > 1 and name[-1:] != "s")}: {", ".join(s)}'
                for name, s in scores.items()
            )
            or 'nothing'
        )

    def rows(self) -> list[dict[str, Any]]:
        """A row of a table for each box, each class of a label map, or each likely class."""
        if self.boxes is not None:
            return [
                dict(label=self.classes[label], score=float(score))
                | dict(zip(('x1', 'y1', 'x2', 'y2'), map(float, box), strict=True))
                for label, score, box in zip(self.labels, self.scores, self.boxes, strict=True)
            ]
        key = 'share' if self.scores is None else 'score'
        return [{'label': self.classes[i], key: float(value)} for i, value in self._shares()]

    def to_supervision(self) -> Any:
        """supervision's `Detections`, of boxes or a label map's classes, or `Classifications`."""
        supervision = require('supervision')
        if self.labels is None:
            order = np.argsort(-self.scores)
            return supervision.Classifications(order, confidence=self.scores[order])
        boxes, labels, masks = self.boxes, self.labels, self.masks
        if boxes is None:
            labels = np.unique(self.labels)
            masks = self.labels == labels[:, None, None]
            boxes = supervision.mask_to_xyxy(masks)
        return supervision.Detections(
            np.asarray(boxes, np.float32),
            masks,
            self.scores,
            labels.astype(int),
            data={'class_name': np.array([self.classes[i] for i in labels], dtype=str)},
        )

    def draw(self) -> np.ndarray:
        """The picture with boxes, masks and names: `(H, W, 3)`, uint8, RGB."""
        pixels, colours = self.image.astype(np.float32), self._colours()
        if self.labels is not None and self.boxes is None:
            pixels = 0.5 * pixels + 0.5 * colours[self.labels]
        if self.masks is not None:
            for mask, label in zip(self.masks, self.labels, strict=True):
                pixels[mask] = 0.5 * pixels[mask] + 0.5 * colours[label]
        picture = Image.fromarray(pixels.astype(np.uint8))
        pen = ImageDraw.Draw(picture)
        size = max(12, round(min(picture.size) / 30))
        font = ImageFont.load_default(size)

        def write(x: float, y: float, text: str, colour: Sequence[int]) -> None:
            _, top, right, _ = pen.textbbox((x, y), text, font, 'lb')
            # Inside of the picture where the box is at its edge.
            x, y = max(0, x - max(0, right - picture.width)), y - min(0, top)
            pen.rectangle(pen.textbbox((x, y), text, font, 'lb'), tuple(colour))
            bright = np.dot(colour, (0.3, 0.6, 0.1)) > 140
            pen.text((x, y), text, 'black' if bright else 'white', font, 'lb')

        if self.boxes is None:
            for row, (i, share) in enumerate(self._shares()[:_TOP]):
                write(0, (row + 1) * 1.4 * size, f'{self.classes[i]} {share:.0%}', colours[i])
            return np.asarray(picture)
        for i in reversed(range(len(self.boxes))):
            colour = tuple(colours[self.labels[i]])
            x1, y1, x2, y2 = map(float, self.boxes[i])
            corners = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
            pen.rectangle(corners, outline=colour, width=max(2, size // 8))
            write(x1, y1, f'{self.classes[self.labels[i]]} {self.scores[i]:.0%}', colour)
        return np.asarray(picture)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the drawn picture."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(self.draw()).save(path)

    def _shares(self) -> list[tuple[int, float]]:
        """Classes of a label map with their parts of it, or the likeliest of a classifier."""
        if self.labels is None:
            return [(i, self.scores[i]) for i in np.argsort(-self.scores)[:_TOP]]
        shares = np.bincount(self.labels.ravel(), minlength=len(self.classes)) / self.labels.size
        return [(i, shares[i]) for i in np.argsort(-shares) if shares[i]]

    def _colours(self) -> np.ndarray:
        """A colour of each class: the data set's, or some that differ."""
        if self.palette is not None and len(self.palette) == len(self.classes):
            return np.asarray(self.palette, np.uint8)
        hues = (np.arange(len(self.classes)) * 0.618 + 0.35) % 1
        return np.array([np.multiply(hsv_to_rgb(h, 0.8, 0.95), 255) for h in hues], np.uint8)


def find_images(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files of folders and patterns, in order, each checked without a model.

    Raises:
        UsageError: A folder or pattern has no picture or video.
        ImageError: A file is not an image that can be read.
    """
    files: list[Path] = []
    for given in (os.fspath(path) for path in paths):
        matches = [given]
        if os.path.isdir(given):
            matches = glob.glob(os.path.join(glob.escape(given), '*'))
        elif not os.path.exists(given) and glob.has_magic(given):
            matches = glob.glob(given, recursive=True)
        if matches != [given]:
            matches = [m for m in sorted(matches) if m.lower().endswith(SUFFIXES + VIDEOS)]
            if not matches:
                raise UsageError(f'there is no picture in {given!r}: give files such as photo.jpg')
        files += map(Path, matches)
    for file in files:
        if file.suffix.lower() not in VIDEOS:
            open_image(file)
        elif not cv2.VideoCapture(os.fspath(file)).isOpened():
            raise UsageError(f'OpenCV cannot read the video {os.fspath(file)!r}')
    return files


def drawings(images: Sequence[Path], out: str | os.PathLike[str]) -> list[tuple[Path, Path]]:
    """Pairs each image or video with the file in a folder for its drawing.

    Raises:
        UsageError: A drawing would be written over an image, or over another drawing.
    """
    pairs: dict[Path, Path] = {}
    taken = {image.resolve() for image in images}
    for image in images:
        file = Path(out) / f'{image.stem}{".mp4" if image.suffix.lower() in VIDEOS else ".png"}'
        if file in pairs or file.resolve() in taken:
            raise UsageError(
                f'the drawing of {os.fspath(image)!r} would be written over {os.fspath(file)!r}: '
                'give another --out, or one image of a name at a time'
            )
        pairs[file] = image
    return [(image, file) for file, image in pairs.items()]


def predict_files(
    predictor: Predictor,
    images: Sequence[tuple[Path, Path]],
    score_thr: float = 0.5,
    save: str | os.PathLike[str] | None = None,
    tiles: int | None = None,
) -> Iterator[tuple[Path, str, Path]]:
    """Predicts for files and writes drawings; yields each file, its prediction and its drawing.

    Args:
        predictor: The model.
        images: Images and videos with the files for their drawings, see `drawings`.
        score_thr: Boxes with a lower score are left out.
        save: A `.csv` of all predictions, or for a detector a `.json` as COCO's annotations with
            scores, which annotation tools import.
        tiles: See `Predictor.predict`.
    """
    if save is not None and Path(save).suffix == '.json' and predictor.scope != 'mmdet':
        raise UsageError("--save FILE.json is COCO's, for detectors: give a .csv")
    found: list[tuple[str, Prediction]] = []

    def predict(name: str, image: Any) -> Prediction:
        prediction = predictor.predict(image, score_thr, tiles)
        if save is not None:
            found.append((name, prediction))
        return prediction

    for image, file in images:
        if image.suffix.lower() in VIDEOS:
            count, writer = 0, None
            capture = cv2.VideoCapture(os.fspath(image))
            file.parent.mkdir(parents=True, exist_ok=True)
            while (frame := capture.read())[0]:
                pixels = np.ascontiguousarray(frame[1][..., ::-1])
                drawing = predict(f'{image}#{count}', pixels).draw()
                if writer is None:
                    rate = capture.get(cv2.CAP_PROP_FPS) or 25
                    code = cv2.VideoWriter.fourcc(*'mp4v')
                    size = drawing.shape[1::-1]
                    writer = cv2.VideoWriter(os.fspath(file), code, rate, size)
                writer.write(np.ascontiguousarray(drawing[..., ::-1]))
                count += 1
            if writer is not None:
                writer.release()
            yield image, f'{count} frames', file
        else:
            prediction = predict(os.fspath(image), image)
            prediction.save(file)
            yield image, repr(prediction), file
    if save is not None:
        write_table(found, predictor.classes, save)


def write_table(
    found: Sequence[tuple[str, Prediction]], classes: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Writes predictions, given with the names of their images, see `predict_files`."""
    if Path(path).suffix == '.csv':
        write_csv([dict(image=name) | row for name, p in found for row in p.rows()], path)
        return
    pictures = []
    for name, p in found:
        rows = (row.values() for row in p.rows())
        objects = [coco_box(label, *box, score=score) for label, score, *box in rows]
        for item, mask in zip(objects, () if p.masks is None else p.masks, strict=False):
            item |= coco_object(item['category'], mask) | dict(bbox=item['bbox'])
        height, width = p.image.shape[:2]
        pictures.append((dict(file_name=name, height=height, width=width), objects))
    write_whole(path, coco_json(classes, pictures).encode())
