"""Predictions for files: pictures, videos, tables, and labels for annotation tools."""

from __future__ import annotations

import atexit
import csv
import glob
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import cv2
import numpy as np

from mmvttt.analysis.tables import cell
from mmvttt.checkpoints.atomic_write import replacing, write_whole
from mmvttt.errors import DataError, UsageError
from mmvttt.pictures import SUFFIXES, fetch_image, open_image

from ..data.write_coco import coco_box, coco_json, coco_object
from ..tasks.prediction import Prediction

if TYPE_CHECKING:
    from .predictor import Predictor

_WRITERS = 2
VIDEOS = ('.mp4', '.avi', '.mov', '.mkv', '.webm', '.m4v')


def find_images(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files of folders, patterns and http addresses, in order, each checked without a model.

    Raises:
        UsageError: A folder or pattern has no picture or video.
        ImageError: A file is not an image that can be read.
    """
    files: list[Path] = []
    for path in [os.fspath(path) for path in paths]:
        matches = [path]
        if urlsplit(path).scheme in ('http', 'https'):
            # A folder for each, as pictures of several sites may have one name.
            folder = tempfile.mkdtemp(prefix='mmvttt_')
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            matches = [path] = [fetch_image(path, folder)]
        elif os.path.isdir(path):
            matches = glob.glob(os.path.join(glob.escape(path), '*'))
        elif not os.path.exists(path) and glob.has_magic(path):
            matches = glob.glob(path, recursive=True)
        if matches != [path]:
            matches = [m for m in sorted(matches) if m.lower().endswith(SUFFIXES + VIDEOS)]
            if not matches:
                raise UsageError(f'there is no picture in {path!r}: give files such as photo.jpg')
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
    sources = {image.resolve() for image in images}
    for image in images:
        file = Path(out) / f'{image.stem}{".mp4" if image.suffix.lower() in VIDEOS else ".png"}'
        if file in pairs or file.resolve() in sources:
            raise UsageError(
                f'the drawing of {os.fspath(image)!r} would be written over {os.fspath(file)!r}: '
                'give another folder, or one image of a name at a time',
                'out',
            )
        pairs[file] = image
    return [(image, file) for file, image in pairs.items()]


def predict_files(
    predictor: Predictor,
    images: Sequence[tuple[Path, Path]],
    score_thr: float = 0.5,
    save: str | os.PathLike[str] | None = None,
    tiles: int | None = None,
    batch: int | None = None,
) -> Iterator[tuple[Path, str, Path]]:
    """Predicts for files, draws, and yields each file, its prediction and its drawing.

    Args:
        predictor: The model.
        images: Images and videos with the files for their drawings, see `drawings`.
        score_thr: Boxes with a lower score are left out.
        save: A `.csv` of all predictions, or for a detector a `.json` as COCO's annotations with
            scores, which annotation tools import.
        tiles: See `Predictor.predict`.
        batch: See `Predictor.stream`.
    """
    if save is not None and Path(save).suffix == '.json' and predictor.task.format != 'COCO':
        raise UsageError(
            f"save={os.fspath(save)!r} would be COCO's, for detectors: give a .csv", 'save'
        )
    photos = [image for image, _ in images if image.suffix.lower() not in VIDEOS]
    predictions: Iterator[Prediction] = iter(())
    if photos:
        predictions = predictor.stream(photos, score_thr, batch, tiles)
    with (
        _table(predictor.classes, save) as add,
        ThreadPoolExecutor(_WRITERS) as pool,
    ):

        def begin(pair: tuple[Path, Path]) -> Callable[[], tuple[Path, str, Path]]:
            """Predicts for a file. The function returned waits until its drawing is written."""
            image, file = pair
            if image.suffix.lower() in VIDEOS:
                count = _draw_video(
                    image, file, lambda frame: predictor.predict(frame, score_thr, tiles), add
                )
                text = f'{count} frames'
                return lambda: (image, text, file)
            prediction = next(predictions)
            add(os.fspath(image), prediction)
            writing = pool.submit(prediction.save, file)
            return lambda: (image, repr(prediction), writing.result() or file)

        waiting: deque[Callable[[], tuple[Path, str, Path]]] = deque()
        try:
            for pair in images:
                waiting.append(begin(pair))
                if len(waiting) > _WRITERS:
                    yield waiting.popleft()()
        except (DataError, UsageError):
            yield from (done() for done in waiting)
            raise
        yield from (done() for done in waiting)


def _draw_video(
    video: Path, file: Path, predict: Callable[[np.ndarray], Prediction], add: Add
) -> int:
    """Writes the drawings of a video's frames as a video, and returns their number."""
    file.parent.mkdir(parents=True, exist_ok=True)
    capture = cv2.VideoCapture(os.fspath(video))
    rate, code = capture.get(cv2.CAP_PROP_FPS) or 25, cv2.VideoWriter.fourcc(*'mp4v')
    count, writer = 0, None
    while (frame := capture.read())[0]:
        prediction = predict(np.ascontiguousarray(frame[1][..., ::-1]))
        add(f'{video}#{count}', prediction)
        drawing = prediction.draw()
        if writer is None:
            writer = cv2.VideoWriter(os.fspath(file), code, rate, drawing.shape[1::-1])
            if not writer.isOpened():
                raise UsageError(
                    f'OpenCV cannot write the video {os.fspath(file)!r}: it has no encoder of '
                    'MPEG-4 here, or the folder cannot be written; give single frames as pictures'
                )
        writer.write(np.ascontiguousarray(drawing[..., ::-1]))
        count += 1
    if writer is None:
        raise UsageError(f'OpenCV reads no frame of the video {os.fspath(video)!r}')
    writer.release()
    if not (file.is_file() and file.stat().st_size):
        raise UsageError(f'OpenCV has not written the video {os.fspath(file)!r}: is the disk full?')
    return count


# Takes the name of an image, and its prediction.
Add = Callable[[str, Prediction], None]


@contextmanager
def _table(classes: Sequence[str], path: str | os.PathLike[str] | None) -> Iterator[Add]:
    """Yields a function that writes the predictions for a file, to a table that exists at the end.

    A .csv has a row without numbers for an image without a box. A .json is written at the end, and
    until then only entries and encoded masks stay in memory.
    """
    if path is None:
        yield lambda name, prediction: None
        return
    if Path(path).suffix == '.json':
        pictures: list[tuple[dict, list[dict]]] = []
        yield lambda name, prediction: pictures.append(_coco_picture(name, prediction))
        write_whole(path, coco_json(classes, pictures).encode())
        return
    with replacing(path) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file, lineterminator='\n')

        def add(name: str, prediction: Prediction) -> None:
            if not file.tell():
                writer.writerow(('image', *prediction.columns))
            for row in prediction.rows() or [{}]:
                writer.writerow(map(cell, (name, *map(row.get, prediction.columns))))

        yield add


def _coco_picture(name: str, prediction: Any) -> tuple[dict, list[dict]]:
    """Entries of an image and of its boxes, see `coco_json`."""
    rows = (row.values() for row in prediction.rows())
    objects = [coco_box(label, *box, score=score) for label, score, *box in rows]
    masks = () if prediction.masks is None else prediction.masks
    for item, mask in zip(objects, masks, strict=False):
        item |= coco_object(item['category'], mask) | dict(bbox=item['bbox'])
    height, width = prediction.image.shape[:2]
    return dict(file_name=name, height=height, width=width), objects
