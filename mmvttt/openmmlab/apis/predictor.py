"""Predictions of trained models on photographs."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, TRANSFORMS
from PIL import Image, ImageOps
from torchvision.ops import batched_nms

from mmvttt.arguments import check_part
from mmvttt.checkpoints.load import adapted, require_whole
from mmvttt.checkpoints.preparation import warn_of_other_images
from mmvttt.checkpoints.read import open_checkpoint, saved_dataset
from mmvttt.deploy.prepare import half_type, prepare
from mmvttt.errors import DataError, UsageError
from mmvttt.named_model import image_channels
from mmvttt.pictures import open_picture

from ..config import building
from ..data.dataset_config import DatasetConfig, datasets_of, preparation_of
from ..export.file_model import FileModel, open_for
from ..registry import resolve_type
from ..reliability.settings import warn_of_other_model
from ..tasks import TASKS, Task, task_of
from ..tasks.prediction import Boxes, Prediction

_READERS = 2
# Transforms of toolboxes that read the image, and those that read annotations.
_IMAGES = (
    'LoadImageFromFile', 'LoadMultiChannelImageFromFiles', 'LoadBiomedicalImageFromFile',
    'LoadSingleRSImageFromFile',
)  # fmt: skip
_LABELS = (
    'LoadAnnotations', 'LoadEmptyAnnotations', 'LoadProposals', 'LoadTextAnnotations',
    'LoadBiomedicalAnnotation', 'LoadDepthAnnotation',
)  # fmt: skip
_PACKAGES = ('mmcv', *(task.toolbox for task in TASKS))
# Boxes of a class in two tiles that share this much of their union are one.
_SAME = 0.5
# Fewer values than this, and two images run at once on a CPU.
_SMALL = 3 * 800 * 800
# A file, an image of Pillow, or pixels (H, W, channels) or (H, W), uint8, RGB.
Photo = str | os.PathLike[str] | Image.Image | np.ndarray


def open_model(
    config: Config,
    checkpoint: str | os.PathLike[str],
    device: str = 'cpu',
    amp: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Predictor:
    """Opens a trained model of mmdet, mmsegmentation or mmpretrain.

    With `amp` its backbone runs in mixed precision. `file` is an `.onnx` or `.xml` of
    `tools/export.py` that predicts in place of the model, see `FileModel`.

    Raises:
        UsageError: The config is of another toolbox or has no model, or the file cannot be used.
        CheckpointError: The checkpoint cannot be read, or would leave parameters at random.
    """
    scope, task = config.get('default_scope'), task_of(config)
    if not task.toolbox:
        toolboxes = ', '.join(task.toolbox for task in TASKS)
        raise UsageError(
            f'default_scope is {scope!r}: photographs need a model of {toolboxes}; '
            'tools/generate.py draws images with a diffusion model'
        )
    tests = [d for d in datasets_of(config, ('test',)) if not d.metric]
    if not tests:
        raise UsageError('the config has no test_dataloader, whose pipeline prepares photographs')
    opened = open_checkpoint(checkpoint)
    weights = opened.weights()
    model_config = copy.deepcopy(config.model)
    if (preprocessor := config.get('data_preprocessor')) is not None:
        model_config.setdefault('data_preprocessor', preprocessor)
    # Names and colours of the classes: the checkpoint's, else the data set's.
    saved = saved_dataset(opened.content)
    dataset = {**tests[0].metainfo, **saved}
    pipeline = copy.deepcopy(list(tests[0].config.get('pipeline') or ()))
    exported = None if file is None else open_for(file, [pipeline], amp, saved.get('classes', ()))
    with building(config):
        model = MODELS.build(model_config)
        predictor = Predictor(model, task, pipeline, dataset)
    require_whole(model, weights, opened.name)
    here = preparation_of(config, 'test', model.data_preprocessor)
    warn_of_other_images(opened.name, opened.preparation, here)
    warn_of_other_model(opened.content, config, opened.name)
    model.load_state_dict(adapted(model, weights), strict=False)
    predictor.model = model = revert_sync_batchnorm(model).to(device).eval()
    if exported is not None:
        predictor.model = FileModel(model, exported, task)
    elif amp:
        predictor.model = prepare(model, 'backbone', half_type())
    return predictor


class Predictor:
    """A trained model that predicts on photographs.

    Attributes:
        model: The model of a toolbox.
        task: Its task.
        classes: Names of its classes.
        pipeline: Prepares an image that has been read.
        metrics: Results on the validation part, of a model that `mmvttt.finetune` returns.
        table: Name, number of validation pictures, and result of each class.
        folder: The folder with its config, checkpoints and pictures.
    """

    metrics: Mapping[str, Any] = MappingProxyType({})
    table: Sequence[tuple[str, int, float]] = ()
    folder: Path | None = None

    def __init__(
        self, model: Any, task: Task, pipeline: Sequence[Mapping], dataset_meta: Mapping
    ) -> None:
        self.model, self.task = model, task
        names = dataset_meta.get('classes') or ()
        # The names of another data set say nothing.
        count = task.class_count(model) or len(names)
        self.classes = list(map(str, names if len(names) == count else range(count)))
        self.palette = dataset_meta.get('palette')
        # Annotations are left out: a photograph has none.
        steps = [step for step in pipeline if not _is_one_of(step, _LABELS)]
        loader: Mapping[str, Any] = dict(type='LoadImageFromFile')
        if steps and _is_one_of(steps[0], _IMAGES):
            loader, *steps = steps
        self.load = TRANSFORMS.build(loader)
        self.pipeline = Compose(steps)
        # Pillow checks the common formats. Other loaders are for files that it may not know.
        reads_files = DatasetConfig(dict(pipeline=[loader])).reads_files
        self.checked = reads_files and loader.get('color_type') not in ('unchanged', 'anycolor')

    def predict(
        self,
        images: Photo | list[Photo] | tuple[Photo, ...],
        score_thr: float = 0.5,
        tiles: int | None = None,
    ) -> Any:
        """Returns a `Prediction` for an image, or a list of them for a list.

        Images of different sizes do not run together: they would be padded, and the padding changes
        what a TTT layer learns from an image.

        Args:
            images: A file, which the config's test pipeline reads, an image of Pillow, or pixels
                `(H, W, channels)` or `(H, W)`, uint8, RGB. A list or tuple has several of them.
            score_thr: Boxes with a lower score are left out.
            tiles: Side in pixels of overlapping tiles, in each of which a detector looks: small
                objects of large pictures.

        Raises:
            ImageError: An image file cannot be read.
            UsageError: An array is not an image for this model.
        """
        if isinstance(images, list | tuple):
            return [*self.stream(images, score_thr, tiles=tiles)]
        (prediction,) = self.stream([images], score_thr, tiles=tiles)
        return prediction

    def stream(
        self,
        images: Iterable[Photo],
        score_thr: float = 0.5,
        batch: int | None = None,
        tiles: int | None = None,
    ) -> Iterator[Prediction]:
        """Yields the predictions for images in their order. Reads ahead, in constant memory.

        Args:
            images: See `predict`. An iterator is read as it is needed.
            score_thr: See `predict`.
            batch: Maximum number of images that run together. They have one size, so that none is
                padded for another. Default: 8 on a GPU, else 1.
            tiles: See `predict`.

        Raises:
            ImageError, UsageError: See `predict`. The predictions for earlier images come first.
        """
        check_part('score_thr', score_thr)
        if tiles is not None and not self.task.merges_tiles:
            raise UsageError('tiles are for detectors: label maps and classes are not merged')
        batch = batch or (8 if any(p.is_cuda for p in self.model.parameters()) else 1)
        with ThreadPoolExecutor(_READERS) as pool:
            if tiles is not None:
                for results in ahead(pool, self._read, images, _READERS):
                    yield self._in_tiles(results['img'], score_thr, batch, tiles)
                return
            prepared = ahead(
                pool, lambda x: self._prepared(self._read(x)), images, batch + _READERS
            )
            yield from self._run(prepared, batch, score_thr)

    def _prepared(self, results: dict[str, Any]) -> tuple[np.ndarray, Any]:
        """An image that has been read, as it is shown and as the model takes it."""
        shown = _shown(results['img'])
        try:
            return shown, self.pipeline(results)
        except cv2.error as error:
            height, width = shown.shape[:2]
            raise UsageError(
                f'{results.get("img_path", "the image")} of {width}×{height} pixels cannot be '
                'resized for this model: cut it into pieces that are less narrow'
            ) from error

    def _run(
        self, prepared: Iterable[tuple[np.ndarray, Any]], batch: int, score_thr: float
    ) -> Iterator[Prediction]:
        """The predictions for prepared images."""
        options = self.classes, score_thr, self.palette

        def step(model: Any, group: list[tuple[np.ndarray, Any]]) -> Any:
            # Not around the yield: the caller of the generator has a mode of its own.
            with torch.no_grad():
                return model.test_step(pseudo_collate([inputs for _, inputs in group]))

        twin: Any = None
        with ThreadPoolExecutor(1) as pool:
            for groups in _groups(_groups(prepared, batch, _shape), 2):
                futures = []
                if len(groups) > 1 and _gains_from_two(self.model, groups[0]):
                    twin = _twin(self.model) if twin is None else twin
                    futures.append(pool.submit(step, twin, groups[1]))
                for number, group in enumerate(groups):
                    first = number == 0 or not futures
                    samples = step(self.model, group) if first else futures[0].result()
                    for sample, (shown, _) in zip(samples, group, strict=True):
                        yield self.task.predicted(sample.cpu(), shown, *options)

    def _in_tiles(self, pixels: np.ndarray, score_thr: float, batch: int, side: int) -> Boxes:
        """The boxes in overlapping tiles of an image as it was read, each object once."""
        height, width = pixels.shape[:2]
        corners = [*product(_starts(height, side), _starts(width, side))]
        tiles = (np.ascontiguousarray(pixels[y : y + side, x : x + side]) for y, x in corners)
        prepared = (self._prepared(_as_read(tile)) for tile in tiles)
        parts: list[tuple[Any, ...]] = []
        for (y, x), p in zip(corners, self._run(prepared, batch, score_thr), strict=True):
            assert isinstance(p, Boxes)
            masks = None
            if p.masks is not None:
                masks = np.zeros((len(p.masks), height, width), bool)
                masks[:, y : y + side, x : x + side] = p.masks
            parts.append((p.scores, p.labels, p.boxes + np.array([x, y, x, y], np.float32), masks))
        scores, labels, boxes = (np.concatenate(x) for x in list(zip(*parts, strict=True))[:3])
        tensors = map(torch.from_numpy, (boxes, scores, labels))
        order = batched_nms(*tensors, _SAME).numpy()
        masks = None if parts[0][3] is None else np.concatenate([part[3] for part in parts])[order]
        fields = scores[order], labels[order], boxes[order], masks
        return Boxes(_shown(pixels), self.classes, *fields, palette=self.palette)

    def _read(self, image: Photo) -> dict[str, Any]:
        """An image as the pipeline gets it, BGR if it has colours."""
        if isinstance(image, str | os.PathLike):
            if self.checked:
                open_picture(image)
            elif not os.path.isfile(image):
                raise UsageError(f'there is no image {os.fspath(image)!r}')
            try:
                return self.load(dict(img_path=os.fspath(image)))
            except AssertionError as error:
                # mmcv raises this where OpenCV returns nothing.
                raise UsageError(
                    f'OpenCV cannot read {os.fspath(image)!r}: write it as an 8-bit PNG'
                ) from error
        return _as_read(_pixels(image, image_channels(self.model)))


def _is_one_of(step: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether a transform is, or extends, one of a toolbox with one of these names."""
    kind = resolve_type(step['type'], TRANSFORMS, None)
    return any(
        base.__name__ in names and base.__module__.partition('.')[0] in _PACKAGES
        for base in getattr(kind, '__mro__', ())
    )


def ahead(
    pool: Executor, function: Callable[[Any], Any], items: Iterable[Any], depth: int
) -> Iterator[Any]:
    """Yields a function's results in the order of its arguments, computed up to `depth` ahead."""
    futures: deque[Future] = deque()
    for item in items:
        futures.append(pool.submit(function, item))
        if len(futures) > depth:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


def _twin(model: Any) -> Any:
    """A copy of a model that shares its tensors, but nothing that a module stores in a call."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def _gains_from_two(model: Any, group: Sequence[tuple[Any, Any]]) -> bool:
    """Whether two calls of a model at once are faster, and as right.

    With small pictures the cores of a CPU wait for Python and for each other: on two of them the
    nano detector takes 133 ms for 480×360 pixels alone, and 93 ms where there are two at once. With
    800×1344 backbones gain nothing, and need the memory twice.
    """
    on_cpu = all(p.device.type == 'cpu' for p in model.parameters())
    small = sum(inputs['inputs'].numel() for _, inputs in group) < _SMALL
    # A hook may write to shared objects, and autocast is on for one thread only.
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    single = hooked or torch.is_autocast_enabled('cpu') or isinstance(model, FileModel)
    return on_cpu and small and not single


def _shape(item: tuple[Any, Any]) -> Any:
    return item[1]['inputs'].shape


def _groups(
    items: Iterable[Any], most: int, kind: Callable[[Any], Any] = lambda item: None
) -> Iterator[list[Any]]:
    """Yields groups of consecutive items of one kind. An error follows the items before it."""
    group: list[Any] = []
    try:
        for item in items:
            if group and kind(item) != kind(group[0]):
                yield group
                group = []
            group.append(item)
            if len(group) == most:
                yield group
                group = []
    except (DataError, UsageError):
        if group:
            yield group
        raise
    if group:
        yield group


def _as_read(pixels: np.ndarray) -> dict[str, Any]:
    """Pixels as a loader leaves them."""
    return dict(img=pixels, img_shape=pixels.shape[:2], ori_shape=pixels.shape[:2])


def _starts(length: int, side: int) -> list[int]:
    """Offsets of tiles of a side that cover a length and overlap by a fifth or more."""
    last = max(0, length - side)
    return [*range(0, last, max(1, side - side // 5)), last]


def _pixels(image: Any, channels: int) -> np.ndarray:
    """An image of Pillow or an array as pixels for a model, uint8, BGR or of other channels."""
    if isinstance(image, Image.Image):
        image = ImageOps.exif_transpose(image)
        # Pillow would cut 16-bit and floating-point pixels off at 255.
        if image.mode[0] not in 'IF':
            image = image.convert('L') if channels == 1 else image
            image = image.convert('RGB') if channels == 3 else image
        image = np.asarray(image)
    if not isinstance(image, np.ndarray):
        raise UsageError(
            f"an image is a {type(image).__name__}: give a file's name, an image of Pillow, or "
            "NumPy's pixels"
        )
    if image.ndim == 2:
        image = image[..., None].repeat(channels, -1)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != channels or not image.size:
        raise UsageError(
            f'an array of pixels is {image.dtype} {image.shape}: give uint8 (H, W, {channels})'
            f'{", RGB" if channels == 3 else ""}, or (H, W)'
        )
    return np.ascontiguousarray(image[..., ::-1] if channels == 3 else image)


def _shown(pixels: np.ndarray) -> np.ndarray:
    """Pixels as a pipeline has them, as a picture `(H, W, 3)`, uint8, RGB."""
    if pixels.dtype != np.uint8:
        pixels = (pixels / max(pixels.max(), 1) * 255).clip(0, 255).astype(np.uint8)
    if pixels.ndim == 2 or pixels.shape[2] < 3:
        pixels = np.atleast_3d(pixels)[..., :1].repeat(3, -1)
    return np.ascontiguousarray(pixels[..., 2::-1])
