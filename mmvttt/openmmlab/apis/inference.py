"""Predictions of trained models on photographs."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, MODELS, TRANSFORMS, init_default_scope
from PIL import Image, ImageOps
from torch import nn

from mmvttt.arguments import check_part
from mmvttt.checkpoints.load import adapted, require_whole
from mmvttt.checkpoints.preparation import warn_of_other_images
from mmvttt.checkpoints.read import open_checkpoint, saved_dataset
from mmvttt.deploy.prepare import prepare
from mmvttt.distributions import require
from mmvttt.errors import UsageError
from mmvttt.named_model import image_channels
from mmvttt.pictures import open_picture

from ..config import named_entries
from ..data.dataset_config import DatasetConfig, datasets_of, preparation_of
from ..engine.amp import half_type
from ..registry import resolve_type, type_name
from .file_inference import FileModel, open_for
from .predict import Prediction

# mmengine's default scope, by which types are found, is the process's.
_BUILDING = threading.Lock()
# A file, an image of Pillow, or pixels (H, W, channels) or (H, W), uint8, RGB.
Photo = str | os.PathLike[str] | Image.Image | np.ndarray
_SCOPES = ('mmdet', 'mmseg', 'mmpretrain')


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
    scope = config.get('default_scope')
    if scope not in _SCOPES:
        raise UsageError(
            f'default_scope is {scope!r}: photographs need a model of {", ".join(_SCOPES)}; '
            'tools/generate.py draws images with a diffusion model'
        )
    tests = [d for d in datasets_of(config) if d.split == 'test' and not d.metric]
    if not tests:
        raise UsageError('the config has no test_dataloader, whose pipeline prepares photographs')
    opened = open_checkpoint(checkpoint)
    weights = opened.weights()
    model_config = copy.deepcopy(config.model)
    if (preprocessor := config.get('data_preprocessor')) is not None:
        model_config.setdefault('data_preprocessor', preprocessor)
    given = tests[0].config
    kind = resolve_type(given.get('type'), DATASETS, scope)
    # Names and colours of the classes: the checkpoint's, else the config's, else of the data set.
    dataset = {**(getattr(kind, 'METAINFO', None) or {}), **(given.get('metainfo') or {})}
    dataset |= saved_dataset(opened.content)
    pipeline = copy.deepcopy(list(given.get('pipeline') or ()))
    exported = None if file is None else open_for(file, [pipeline], amp)
    with _BUILDING, named_entries(config):
        init_default_scope(scope)
        model = MODELS.build(model_config)
        predictor = Predictor(model, scope, pipeline, dataset)
    require_whole(model, weights, opened.name)
    here = preparation_of(config, 'test', model.data_preprocessor)
    warn_of_other_images(opened.name, opened.preparation, here)
    model.load_state_dict(adapted(model, weights), strict=False)
    predictor.model = model = revert_sync_batchnorm(model).to(device).eval()
    if exported is not None:
        predictor.model = FileModel(model, exported)
    elif amp:
        predictor.model = prepare(model, 'backbone', half_type())
    return predictor


class Predictor:
    """A trained model that predicts on photographs.

    Attributes:
        model: The model of a toolbox.
        classes: Names of its classes.
        pipeline: Prepares an image that has been read.
    """

    def __init__(
        self, model: Any, scope: str, pipeline: Sequence[Mapping], dataset_meta: Mapping
    ) -> None:
        self.model, self.scope = model, scope
        head = getattr(model, 'decode_head', None)
        if isinstance(head, nn.ModuleList):
            # The last head of a cascade, such as OCRNet's, decides.
            head = head[-1]
        names = dataset_meta.get('classes') or ()
        # The names of another data set say nothing.
        count = getattr(head, 'num_classes', len(names))
        self.classes = list(map(str, names if len(names) == count else range(count)))
        self.palette = dataset_meta.get('palette')
        # Annotations are left out: a photograph has none.
        steps = [
            (type_name(step['type']).rpartition('.')[2].startswith('Load'), step)
            for step in pipeline
        ]
        loader = steps[0][1] if steps and steps[0][0] else dict(type='LoadImageFromFile')
        self.load = TRANSFORMS.build(loader)
        self.pipeline = Compose([step for loads, step in steps if not loads])
        # Pillow reads what is common; another reader is for files that Pillow may not know.
        reads_files = DatasetConfig(dict(pipeline=[loader])).reads_files
        self.checked = reads_files and loader.get('color_type') not in ('unchanged', 'anycolor')

    def predict(
        self,
        images: Photo | list[Photo] | tuple[Photo, ...],
        score_thr: float = 0.5,
        tiles: int | None = None,
    ) -> Any:
        """Returns a `Prediction` for an image, or a list of them for a list.

        Images are predicted one at a time: images of different sizes in one batch would be padded,
        and the padding changes what a TTT layer learns from an image.

        Args:
            images: A file, which is read as the config's test pipeline reads it; an image of
                Pillow; or pixels `(H, W, channels)` or `(H, W)`, uint8, RGB; or a list of them.
            score_thr: Boxes with a lower score are left out.
            tiles: Side in pixels of overlapping tiles, in each of which a detector looks: small
                objects of large pictures. Needs `pip install 'mmvttt[predict]'`.

        Raises:
            ImageError: An image file cannot be read.
            UsageError: An array is not an image for this model.
        """
        if isinstance(images, list | tuple):
            return [self.predict(image, score_thr, tiles) for image in images]
        check_part('score_thr', score_thr)
        results = self._read(images)
        shown = _shown(results['img'])
        if tiles is not None:
            return self._in_tiles(shown, score_thr, tiles)
        try:
            inputs = self.pipeline(results)
        except cv2.error as error:
            height, width = shown.shape[:2]
            raise UsageError(
                f'{results.get("img_path", "the image")} of {width}×{height} pixels cannot be '
                'resized for this model: cut it into pieces that are less narrow'
            ) from error
        with torch.no_grad():
            sample = self.model.test_step(pseudo_collate([inputs]))[0].cpu()
        found: dict[str, Any] = {}
        if self.scope == 'mmdet':
            instances = sample.pred_instances
            instances = instances[instances.scores >= score_thr]
            found = {k: instances[k].numpy() for k in ('scores', 'labels')}
            found['boxes'] = instances.bboxes.numpy()
            masks = instances.get('masks')
            found['masks'] = None if masks is None else np.asarray(masks, bool)
        elif self.scope == 'mmseg':
            # mmseg's label map of a binary segmentor is of floating-point numbers.
            found['labels'] = sample.pred_sem_seg.data[0].numpy().astype(np.int64)
        else:
            found['scores'] = sample.pred_score.numpy()
        classes = self.classes or [str(i) for i in range(len(found.get('scores', ())))]
        return Prediction(shown, classes, palette=self.palette, **found)

    def _in_tiles(self, image: np.ndarray, score_thr: float, side: int) -> Prediction:
        """The boxes in overlapping tiles of an image, without those found twice."""
        if self.scope != 'mmdet':
            raise UsageError('tiles are for detectors: label maps and classes are not merged')
        slicer = require('supervision').InferenceSlicer(
            lambda tile: self.predict(tile, score_thr).to_supervision(),
            slice_wh=(side, side),
            overlap_wh=(side // 5, side // 5),
        )
        merged: Any = slicer(image)
        order = np.argsort(-merged.confidence)
        masks = None if merged.mask is None else np.asarray(merged.mask, bool)[order]
        found = merged.confidence[order], merged.class_id[order], merged.xyxy[order], masks
        return Prediction(image, self.classes, *found, self.palette)

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
        pixels = _pixels(image, image_channels(self.model))
        return dict(img=pixels, img_shape=pixels.shape[:2], ori_shape=pixels.shape[:2])


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
