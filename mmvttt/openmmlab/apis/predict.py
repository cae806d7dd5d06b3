"""Predictions for files: folders, patterns and videos in, pictures, tables and labels out."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from mmvttt.analysis.tables import write_csv
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import UsageError
from mmvttt.pictures import SUFFIXES, open_image

from .inference import Predictor
from .prediction import Prediction

VIDEOS = ('.mp4', '.avi', '.mov', '.mkv', '.webm', '.m4v')


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
    for image in images:
        file = Path(out) / f'{image.stem}{".mp4" if image.suffix.lower() in VIDEOS else ".png"}'
        if image.resolve().parent == Path(out).resolve():
            raise UsageError(
                f'the drawing would be written over {os.fspath(image)!r}: give another --out'
            )
        if file in pairs:
            raise UsageError(
                f'several images are called {file.stem!r}: show one at a time, with --out'
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
            yield image, repr(prediction) or 'nothing', file
    if save is not None:
        write_table(found, predictor.classes, save)


def write_table(
    found: Sequence[tuple[str, Prediction]], classes: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Writes predictions, given with the names of their images, see `predict_files`."""
    if Path(path).suffix == '.csv':
        write_csv([dict(image=name) | row for name, p in found for row in p.rows()], path)
        return
    from pycocotools import mask

    if any(prediction.boxes is None for _, prediction in found):
        raise UsageError("--save FILE.json is COCO's, for detectors: give a .csv")
    content: dict[str, list[dict[str, Any]]] = dict(
        images=[], annotations=[], categories=[dict(id=i, name=n) for i, n in enumerate(classes, 1)]
    )
    for number, (name, p) in enumerate(found, 1):
        height, width = p.image.shape[:2]
        content['images'].append(dict(id=number, file_name=name, height=height, width=width))
        for i, (x1, y1, x2, y2) in enumerate(np.asarray(p.boxes, float).tolist()):
            count = len(content['annotations']) + 1
            row: dict[str, Any] = dict(id=count, image_id=number, iscrowd=0)
            row |= dict(category_id=int(p.labels[i]) + 1, score=float(p.scores[i]))
            row |= dict(bbox=[x1, y1, x2 - x1, y2 - y1], area=(x2 - x1) * (y2 - y1))
            if p.masks is not None:
                code = mask.encode(np.asfortranarray(p.masks[i], np.uint8))
                row |= dict(segmentation=code | dict(counts=code['counts'].decode()))
                row['area'] = float(mask.area(code))
            content['annotations'].append(row)
    write_whole(path, json.dumps(content).encode())
