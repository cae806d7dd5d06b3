"""Predictions on photographs and videos, described and drawn by each toolbox's own inferencer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.registry import init_default_scope
from PIL import Image

from mmvttt.checkpoints.load import require_whole
from mmvttt.checkpoints.read import read_content, read_weights
from mmvttt.checkpoints.sources import without_password
from mmvttt.deploy.runtime import open_exported
from mmvttt.errors import UsageError

from ..engine.amp import autocast_backbone
from ..models.diffusion_model import refuse_diffusion
from ..reliability.data.images import FORMATS, read_image
from .file_inference import run_file

_TOP = 5
_CODEC = cv2.VideoWriter_fourcc(*'mp4v')

Look = Callable[[np.ndarray, float], tuple[list[str], np.ndarray]]


@dataclass(frozen=True)
class Finding:
    """The prediction for one image.

    Attributes:
        image: The image's path.
        lines: Description of the prediction, the likeliest or the largest first.
        picture: The drawn picture.
    """

    image: Path
    lines: list[str]
    picture: Path


def show_images(
    config: Config,
    checkpoint: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    score_thr: float = 0.3,
    device: str = 'cpu',
    amp: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Iterator[Finding]:
    """Runs a model on photographs and draws the prediction: boxes and masks, labels, or a class.

    Args:
        config: Of a model of mmdet, mmsegmentation or mmpretrain.
        checkpoint: Its weights.
        images: Files.
        out_dir: Folder of the pictures, made if missing.
        score_thr: Boxes with a lower score are neither drawn nor named.
        device: Where to run.
        amp: Run the backbone in mixed precision.
        file: An `.onnx` or `.xml` of `tools/export.py` that predicts in place of the model, see
            `run_file`.

    Raises:
        UsageError: There is no such image, or the config is of another toolbox or has no model.
        CheckpointError: The checkpoint cannot be read, or has next to nothing for the model.
    """
    _require_scope(config)
    for image in images:
        if not Path(image).is_file():
            raise UsageError(f'there is no image {os.fspath(image)!r}')
        require_image(image)
        if Path(image).resolve().parent == Path(out_dir).resolve():
            raise UsageError(
                f'the picture would be written over {os.fspath(image)!r}: give another --out'
            )
    stems = [Path(image).stem for image in images]
    for image, stem in zip(images, stems, strict=True):
        if stems.count(stem) > 1:
            raise UsageError(
                f'several images are called {stem!r}: {os.fspath(image)!r} and another; a picture '
                'would be written over the other: show one at a time, with --out'
            )
    look = open_model(config, checkpoint, device, amp, file)
    for image in map(Path, images):
        lines, picture = look(mmcv.imread(str(image)), score_thr)
        out = Path(out_dir) / f'{image.stem}.png'
        mmcv.imwrite(mmcv.rgb2bgr(picture), str(out))
        yield Finding(image, lines, out)


def require_image(path: str | os.PathLike[str], max_pixels: int | None = None) -> None:
    """Refuses a file that is no image, is damaged or has too many pixels.

    The content decides about the format, not the name. Formats for which Pillow would start another
    program (EPS) are refused.

    Args:
        path: A file.
        max_pixels: Height times width of the largest image; None for no limit.

    Raises:
        UsageError: The file is refused.
    """
    if max_pixels is not None:
        try:
            # The header alone: a file of some kilobytes can hold gigabytes of pixels.
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
        except Exception:
            width = height = 0  # named below
        if width * height > max_pixels:
            raise UsageError(
                f'{Path(path).name!r} has {width}×{height} pixels, and {max_pixels:,} are allowed: '
                'give a smaller image'
            )
    problem = read_image(os.fspath(path)).problem
    if problem:
        raise UsageError(f'{Path(path).name!r} is among the {problem}')


def show_video(
    config: Config,
    checkpoint: str | os.PathLike[str],
    source: str | os.PathLike[str] | int,
    out: str | os.PathLike[str],
    score_thr: float = 0.3,
    device: str = 'cpu',
    amp: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Iterator[list[str]]:
    """Runs a model on every frame of a video or a camera, and writes the drawn frames as a video.

    Args:
        config, checkpoint, score_thr, device, amp, file: As in `show_images`.
        source: A video file, or the number of a camera, which runs until the caller stops.
        out: The .mp4 file to write.

    Yields:
        The description of each frame's prediction.

    Raises:
        UsageError: There is no such video or camera; else as `show_images`.
        CheckpointError: As in `show_images`.
    """
    capture = cv2.VideoCapture(source if isinstance(source, int) else os.fspath(source))
    writer = None
    try:
        if not capture.isOpened():
            kind = 'camera' if isinstance(source, int) else 'video that OpenCV can read at'
            raise UsageError(f'there is no {kind} {source!r}')
        look = open_model(config, checkpoint, device, amp, file)
        while (read := capture.read())[0]:
            lines, picture = look(read[1], score_thr)
            frame = mmcv.rgb2bgr(picture)
            if writer is None:
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                # A camera may not know; 25 is a television's.
                rate = capture.get(cv2.CAP_PROP_FPS) or 25
                size = (frame.shape[1], frame.shape[0])
                writer = cv2.VideoWriter(os.fspath(out), _CODEC, rate, size)
            writer.write(frame)
            yield lines
    finally:
        capture.release()
        if writer is not None:
            writer.release()


def open_model(
    config: Config,
    checkpoint: str | os.PathLike[str],
    device: str = 'cpu',
    amp: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Look:
    """A function that looks at an image `(H, W, 3)`, uint8, BGR, with a threshold for boxes.

    The function returns a description, the likeliest or the largest first, and the drawn picture
    `(H, W, 3)`, uint8, RGB.

    Args:
        config, checkpoint, amp, file: As in `show_images`.
        device: Where to run.

    Raises:
        UsageError: The config is of another toolbox or has no model, or the file cannot be used.
        CheckpointError: The checkpoint cannot be read, or would leave parameters at random.
    """
    scope = _require_scope(config)
    # Toolboxes log it.
    checkpoint = without_password(os.fspath(checkpoint))
    # Before the toolboxes stumble over what is no checkpoint.
    weights = read_weights(checkpoint)
    init_default_scope(scope)
    look = _LOOKS[scope](config, os.fspath(checkpoint), device)
    require_whole(look.run.model, weights, os.fspath(checkpoint))
    if file is not None:
        exported = open_exported(file, 'bfloat16' if amp else 'float32')
        run_file(look.run.model, look.run.pipeline.transforms, exported)
    elif amp:
        autocast_backbone(look.run.model)
    return look


def _require_scope(config: Config) -> str:
    refuse_diffusion(config, 'tools/generate.py draws images with it')
    scope = config.get('default_scope')
    if scope not in _LOOKS:
        raise UsageError(f'default_scope is {scope!r}: images are shown by {", ".join(_LOOKS)}')
    if 'model' not in config:
        raise UsageError('the config has no model')
    return scope


class _Detector:
    def __init__(self, config: Config, checkpoint: str, device: str) -> None:
        from mmdet.apis import DetInferencer

        self.run = DetInferencer(config, checkpoint, device=device, show_progress=False)

    def __call__(self, image: np.ndarray, score_thr: float) -> tuple[list[str], np.ndarray]:
        sample = self.run(image, return_datasamples=True)['predictions'][0].cpu()
        found = sample.pred_instances
        found = found[found.scores >= score_thr]
        classes = self.run.model.dataset_meta['classes']
        lines = [
            f'{classes[label]} {score:.2f} at {", ".join(f"{v:.0f}" for v in box)}'
            for label, score, box in zip(found.labels, found.scores, found.bboxes, strict=True)
        ]
        return lines, _drawn(self.run.visualizer, image, sample, pred_score_thr=score_thr)


class _Segmentor:
    def __init__(self, config: Config, checkpoint: str, device: str) -> None:
        from mmseg.apis import MMSegInferencer

        # By itself it would name and paint the classes of Cityscapes.
        meta = _dataset_meta(checkpoint)
        heads = config.model.decode_head
        # The last head of a cascade, such as OCRNet's, decides.
        count = (heads if isinstance(heads, Mapping) else heads[-1]).num_classes
        self.classes = [str(c) for c in meta.get('classes') or range(count)]
        # The checkpoint may be of other classes: it is compared with the model later.
        palette = meta.get('palette') or _palette(len(self.classes))
        self.run = MMSegInferencer(
            config, checkpoint, classes=self.classes, palette=palette, device=device
        )
        self.run.model.dataset_meta = dict(classes=self.classes, palette=palette)
        self.run.show_progress = False

    def __call__(self, image: np.ndarray, score_thr: float) -> tuple[list[str], np.ndarray]:
        sample = self.run(image, return_datasamples=True)
        # mmseg's label map of a binary segmentor is of floating-point numbers.
        labels = sample.pred_sem_seg.data.cpu().numpy().astype(np.int64)
        shares = np.bincount(labels.ravel(), minlength=len(self.classes)) / labels.size
        lines = [f'{self.classes[i]} {shares[i]:.1%}' for i in np.argsort(-shares) if shares[i]]
        return lines, _drawn(self.run.visualizer, image, sample)


class _Classifier:
    def __init__(self, config: Config, checkpoint: str, device: str) -> None:
        from mmpretrain import ImageClassificationInferencer
        from mmpretrain.visualization import UniversalVisualizer

        self.run = ImageClassificationInferencer(config, checkpoint, device=device)
        self.visualizer = UniversalVisualizer()

    def __call__(self, image: np.ndarray, score_thr: float) -> tuple[list[str], np.ndarray]:
        # Not by a call, which shows a bar that mmpretrain may leave open and rich cannot nest.
        (data,) = self.run.preprocess([image])
        (sample,) = self.run.forward(data)
        scores = sample.pred_score.cpu().numpy()
        names = self.run.classes or [str(i) for i in range(len(scores))]
        lines = [f'{names[i]} {scores[i]:.3f}' for i in np.argsort(-scores)[:_TOP]]
        picture = mmcv.bgr2rgb(image)
        self.visualizer.visualize_cls(picture, sample, classes=self.run.classes, draw_gt=False)
        return lines, self.visualizer.get_image()


_LOOKS: dict[str, Any] = {'mmdet': _Detector, 'mmseg': _Segmentor, 'mmpretrain': _Classifier}


def _drawn(visualizer: Any, image: np.ndarray, sample: Any, **options: Any) -> np.ndarray:
    # The visualizers draw on RGB, the models read BGR.
    picture = mmcv.bgr2rgb(image)
    visualizer.add_datasample('', picture, sample, draw_gt=False, **options)
    return visualizer.get_image()


def _dataset_meta(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and colours of the classes in a checkpoint; the toolboxes do not check them."""
    content = read_content(checkpoint)
    meta = content.get('meta') if isinstance(content, Mapping) else None
    found = meta.get('dataset_meta') if isinstance(meta, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _palette(count: int) -> list[list[int]]:
    """Colors that are the same every time."""
    return np.random.default_rng(0).integers(0, 256, (count, 3)).tolist()
