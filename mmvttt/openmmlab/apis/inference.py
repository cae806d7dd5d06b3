"""Predictions of trained models on photographs, as arrays and as pictures."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.registry import init_default_scope
from PIL import Image, ImageOps

from mmvttt.checkpoints.load import require_whole
from mmvttt.checkpoints.read import named_tensors, read_content
from mmvttt.checkpoints.sources import without_password
from mmvttt.errors import UsageError
from mmvttt.pictures import open_image, open_picture

from ..engine.amp import autocast_backbone
from ..models.diffusion_model import refuse_diffusion
from ..reliability.data.dataset_config import datasets_of
from ..reliability.settings import warn_of_other_preparation
from .file_inference import run_file

_TOP = 5
# A file, an image of Pillow, or pixels (H, W, 3) or (H, W), uint8, RGB.
Photo = str | os.PathLike[str] | Image.Image | np.ndarray


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image; arrays are NumPy's.

    Attributes:
        classes: Names of the classes.
        scores: Of the boxes `(N,)`, the highest first, or of all classes `(C,)`. None for a label
            map.
        labels: Indices into `classes`: of the boxes `(N,)`, or of the pixels `(H, W)`. None for a
            classifier.
        boxes: `(N, 4)`, x1, y1, x2, y2 in pixels of the image. None for other models.
        masks: `(N, H, W)`, bool. None for a model without masks.
        lines: The prediction in words, the likeliest or the largest first.
        draw: Draws the prediction on the image: `(H, W, 3)`, uint8, RGB.
    """

    classes: Sequence[str]
    scores: np.ndarray | None
    labels: np.ndarray | None
    boxes: np.ndarray | None
    masks: np.ndarray | None
    lines: list[str]
    draw: Callable[[], np.ndarray]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the drawn picture."""
        mmcv.imwrite(mmcv.rgb2bgr(self.draw()), os.fspath(path))


def require_images(
    images: Sequence[str | os.PathLike[str]], out_dir: str | os.PathLike[str]
) -> list[Path]:
    """Checks image files without a model; returns the files of their pictures in a folder.

    Raises:
        ImageError: A file is not an image that can be read.
        UsageError: A picture would be written over a file.
    """
    pictures = [Path(out_dir) / f'{Path(image).stem}.png' for image in images]
    for image, picture in zip(images, pictures, strict=True):
        open_image(image)
        if Path(image).resolve().parent == Path(out_dir).resolve():
            raise UsageError(
                f'the picture would be written over {os.fspath(image)!r}: give another --out'
            )
        if pictures.count(picture) > 1:
            raise UsageError(
                f'several images are called {picture.stem!r}: show one at a time, with --out'
            )
    return pictures


def open_model(
    config: Config,
    checkpoint: str | os.PathLike[str],
    device: str = 'cpu',
    amp: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Predictor:
    """Opens a trained model of mmdet, mmsegmentation or mmpretrain.

    With `amp` its backbone runs in mixed precision. `file` is an `.onnx` or `.xml` of
    `tools/export.py` that predicts in place of the model, see `run_file`.

    Raises:
        UsageError: The config is of another toolbox or has no model, or the file cannot be used.
        CheckpointError: The checkpoint cannot be read, or would leave parameters at random.
    """
    refuse_diffusion(config)
    scope = config.get('default_scope')
    if scope not in _PREDICTORS:
        raise UsageError(
            f'default_scope is {scope!r}: images are shown by {", ".join(_PREDICTORS)}'
        )
    # Toolboxes log it.
    source = without_password(os.fspath(checkpoint))
    # The inferencers of mmdet and mmseg leave out one beside the model.
    config = copy.deepcopy(config)
    if (preprocessor := config.get('data_preprocessor')) is not None:
        config.model.setdefault('data_preprocessor', preprocessor)
    # And none looks for the pipeline inside of a ConcatDataset.
    tests = [d.config for d in datasets_of(config) if d.split == 'test' and not d.metric]
    if not tests:
        raise UsageError('the config has no test_dataloader, whose pipeline prepares photographs')
    config.test_dataloader.dataset = tests[0]
    # The errors of the toolboxes for another file do not name it.
    content = read_content(source)
    weights = named_tensors(content, source)
    warn_of_other_preparation(content, source, config)
    init_default_scope(scope)
    predictor = _PREDICTORS[scope](config, source, device, _dataset_meta(content))
    require_whole(predictor.run.model, weights, source)
    if file is not None:
        run_file(predictor.run.model, [predictor.run.pipeline.transforms], file, amp)
    elif amp:
        autocast_backbone(predictor.run.model)
    return predictor


class Predictor:
    """A trained model that predicts on photographs, by the inferencer of its toolbox (`run`)."""

    run: Any

    def predict(self, images: Photo | Sequence[Photo], score_thr: float = 0.5) -> Any:
        """Returns a `Prediction` for an image, or a list of them for a list.

        Images are predicted one at a time: images of different sizes in one batch would be padded,
        and the padding changes what a TTT layer learns from an image.

        Args:
            images: A file, an image of Pillow, or pixels `(H, W, 3)` or `(H, W)`, uint8, RGB; or a
                list of them.
            score_thr: Boxes with a lower score are left out.

        Raises:
            ImageError: An image file cannot be read.
            UsageError: An array is not an image.
        """
        if isinstance(images, list | tuple):
            return [self.predict(image, score_thr) for image in images]
        return self._predict(_pixels(images), score_thr)

    def _predict(self, image: np.ndarray, score_thr: float) -> Prediction:
        """Predicts for pixels `(H, W, 3)`, uint8, BGR."""
        raise NotImplementedError


class _Detector(Predictor):
    def __init__(self, config: Config, checkpoint: str, device: str, meta: Mapping) -> None:
        from mmdet.apis import DetInferencer

        self.run = DetInferencer(config, checkpoint, device=device, show_progress=False)

    def _predict(self, image: np.ndarray, score_thr: float) -> Prediction:
        sample = self.run(image, return_datasamples=True)['predictions'][0].cpu()
        instances = sample.pred_instances
        instances = instances[instances.scores >= score_thr]
        labels, scores, boxes = (instances[name].numpy() for name in ('labels', 'scores', 'bboxes'))
        masks = instances.get('masks')
        classes = self.run.model.dataset_meta['classes']
        lines = [
            f'{classes[label]} {score:.2f} at {", ".join(f"{v:.0f}" for v in box)}'
            for label, score, box in zip(labels, scores, boxes, strict=True)
        ]
        masks = None if masks is None else np.asarray(masks, bool)
        draw = partial(_drawn, self.run.visualizer, image, sample, pred_score_thr=score_thr)
        return Prediction(classes, scores, labels, boxes, masks, lines, draw)


class _Segmentor(Predictor):
    def __init__(self, config: Config, checkpoint: str, device: str, meta: Mapping) -> None:
        from mmseg.apis import MMSegInferencer

        # By itself it would name and paint the classes of Cityscapes.
        heads = config.model.decode_head
        # The last head of a cascade, such as OCRNet's, decides.
        count = (heads if isinstance(heads, Mapping) else heads[-1]).num_classes
        self.classes = [str(c) for c in meta.get('classes') or range(count)]
        # The checkpoint may be of other classes: it is compared with the model later.
        colours = np.random.default_rng(0).integers(0, 256, (len(self.classes), 3))
        palette = meta.get('palette') or colours.tolist()
        self.run = MMSegInferencer(
            config, checkpoint, classes=self.classes, palette=palette, device=device
        )
        self.run.model.dataset_meta = dict(classes=self.classes, palette=palette)
        self.run.show_progress = False

    def _predict(self, image: np.ndarray, score_thr: float) -> Prediction:
        sample = self.run(image, return_datasamples=True)
        # mmseg's label map of a binary segmentor is of floating-point numbers.
        labels = sample.pred_sem_seg.data[0].cpu().numpy().astype(np.int64)
        shares = np.bincount(labels.ravel(), minlength=len(self.classes)) / labels.size
        lines = [f'{self.classes[i]} {shares[i]:.1%}' for i in np.argsort(-shares) if shares[i]]
        draw = partial(_drawn, self.run.visualizer, image, sample)
        return Prediction(self.classes, None, labels, None, None, lines, draw)


class _Classifier(Predictor):
    def __init__(self, config: Config, checkpoint: str, device: str, meta: Mapping) -> None:
        from mmpretrain import ImageClassificationInferencer
        from mmpretrain.visualization import UniversalVisualizer

        self.run = ImageClassificationInferencer(config, checkpoint, device=device)
        self.visualizer = UniversalVisualizer()

    def _predict(self, image: np.ndarray, score_thr: float) -> Prediction:
        # Not by a call, which shows a bar that mmpretrain may leave open and rich cannot nest.
        (data,) = self.run.preprocess([image])
        (sample,) = self.run.forward(data)
        scores = sample.pred_score.cpu().numpy()
        names = self.run.classes or [str(i) for i in range(len(scores))]
        lines = [f'{names[i]} {scores[i]:.3f}' for i in np.argsort(-scores)[:_TOP]]

        def draw() -> np.ndarray:
            picture = mmcv.bgr2rgb(image)
            classes = self.run.classes
            self.visualizer.visualize_cls(picture, sample, classes=classes, draw_gt=False)
            return self.visualizer.get_image()

        return Prediction(names, scores, None, None, None, lines, draw)


_PREDICTORS: dict[str, Callable[[Config, str, str, Mapping], Predictor]] = {
    'mmdet': _Detector,
    'mmseg': _Segmentor,
    'mmpretrain': _Classifier,
}


def _pixels(image: Photo) -> np.ndarray:
    """An image as pixels `(H, W, 3)`, uint8, BGR."""
    if isinstance(image, str | os.PathLike):
        # Its checks and its warning of dark pictures; the pixels are those of a training's reader.
        open_picture(image)
        pixels = mmcv.imread(os.fspath(image))
        if pixels is None:
            raise UsageError(f'OpenCV cannot read {os.fspath(image)!r}: write it as an 8-bit PNG')
        return pixels
    if isinstance(image, Image.Image):
        image = ImageOps.exif_transpose(image)
        # Pillow would cut 16-bit and floating-point pixels off at 255.
        image = np.asarray(image if image.mode[0] in 'IF' else image.convert('RGB'))
    if not isinstance(image, np.ndarray):
        raise UsageError(
            f"an image is a {type(image).__name__}: give a file's name, an image of Pillow, or "
            "NumPy's pixels"
        )
    if image.ndim == 2:
        image = image[..., None].repeat(3, -1)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise UsageError(
            f'an array of pixels is {image.dtype} {image.shape}: give uint8 (H, W, 3), RGB, or '
            '(H, W)'
        )
    return np.ascontiguousarray(image[..., ::-1])


def _drawn(visualizer: Any, image: np.ndarray, sample: Any, **options: Any) -> np.ndarray:
    # The visualizers draw on RGB, the models read BGR.
    picture = mmcv.bgr2rgb(image)
    visualizer.add_datasample('', picture, sample, draw_gt=False, **options)
    return visualizer.get_image()


def _dataset_meta(content: Any) -> Mapping:
    """Names and colours of the classes in a checkpoint; the toolboxes do not check them."""
    meta = content.get('meta') if isinstance(content, Mapping) else None
    classes = meta.get('dataset_meta') if isinstance(meta, Mapping) else None
    return classes if isinstance(classes, Mapping) else {}
