"""Files of `tools/export.py` in the place of a model."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.structures import InstanceData, PixelData
from torch import Tensor

from mmvttt.checkpoints.preparation import OPTIONS, differences, of_preprocessor
from mmvttt.deploy.runtime import ExportedFile, open_exported
from mmvttt.errors import UsageError

from ..registry import TRANSFORMS, resolve_type, type_name


class FileModel(BaseModel):
    """A model of mmdet, mmsegmentation or mmpretrain whose predictions an exported file makes.

    Args:
        model: Prepares the images and makes its predictions of the file's outputs; stays as it is.
        file: An `.onnx` or `.xml` of `tools/export.py`.

    Raises:
        UsageError: The file, or at a call an image, does not fit the model.
    """

    def __init__(self, model: Any, file: ExportedFile) -> None:
        super().__init__(data_preprocessor=model.data_preprocessor)
        require_same_preparation(file, model.data_preprocessor)
        self.model, self.file = model, file
        self.dataset_meta = getattr(model, 'dataset_meta', None)
        self.boxes = any(hasattr(model, f'{kind}_head') for kind in ('bbox', 'roi', 'panoptic'))
        if self.boxes and file.names[0] != 'dets':
            raise UsageError(
                f'{file.path!r} ends at the maps of the neck: write it with '
                'tools/export.py --predictions'
            )

    def forward(self, inputs: Tensor, data_samples: Sequence[Any], mode: str = 'predict') -> Any:
        """Predictions for prepared images."""
        if not self.boxes and not hasattr(self.model, 'decode_head'):
            head = copy.copy(self.model.head)
            # Its scores are the file's.
            head.forward = lambda scores: scores
            return head.predict(self.file(inputs)[0], data_samples)
        predict = _detections if self.boxes else _segments
        return [
            predict(self.model, self.file(self._fitted(image, sample)), sample)
            for image, sample in zip(inputs.split(1), data_samples, strict=True)
        ]

    def _fitted(self, image: Tensor, sample: Any) -> Tensor:
        """An image without the preprocessor's padding, filled up to the size of the file."""
        size, (height, width) = self.file.size, sample.img_shape[:2]
        sample.set_metainfo(dict(img_padding_size=[0] * 4, padding_size=[0] * 4))
        image = image[:, :, :height, :width]
        if size is None:
            return image
        if height > size[0] or width > size[1]:
            raise UsageError(
                f'{self.file.path!r} takes images of {size[0]}×{size[1]}, and the pipeline makes '
                f'one of {height}×{width}: it needs the step Resize, which is fitted to the file'
            )
        return F.pad(image, (0, size[1] - width, 0, size[0] - height))


def open_for(
    path: str | os.PathLike[str], pipelines: Iterable[list], amp: bool = False
) -> ExportedFile:
    """Opens a file that predicts for a model, and fits its test pipelines to the file's size.

    Each `Resize` becomes `ResizeInto`. With `amp` OpenVINO computes in bf16.
    """
    file = open_exported(path, 'bfloat16' if amp else 'float32')
    for pipeline in pipelines if file.size is not None else ():
        for i, step in enumerate(pipeline):
            if type_name(step['type']).rpartition('.')[2] == 'Resize':
                pipeline[i] = dict(type='mmvttt.ResizeInto', resize=step, size=file.size)
    return file


def require_same_preparation(file: ExportedFile, preprocessor: Any) -> None:
    """Compares mean, deviation and order of channels in a file's notes with a preprocessor's.

    Raises:
        UsageError: They differ, so that the file would see other numbers than its model.
    """
    if 'mean' not in file.notes:
        # Written from a model without a config, or by another program.
        return
    saved = of_preprocessor({k: json.loads(file.notes[k]) for k in OPTIONS if k in file.notes})
    for name, there, here in differences(saved, of_preprocessor(preprocessor)):
        raise UsageError(
            f'{file.path!r} was exported for images with {name}={there}, and the '
            f"data_preprocessor here has {name}={here}: give the export's config"
        )


@TRANSFORMS.register_module()
class ResizeInto:
    """A pipeline's `Resize` to the largest size of the image's ratio inside (height, width)."""

    def __init__(self, resize: dict[str, Any], size: Sequence[int]) -> None:
        # Resolved here, in the pipeline's scope, which may differ from the scope of a call.
        kind = resolve_type(resize['type'], TRANSFORMS, None)
        self.resize, self.size = dict(resize, type=kind), size

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        sides = results['img'].shape[:2]
        factor = min(np.divide(self.size, sides))
        height, width = (max(1, int(side * factor + 0.5)) for side in sides)
        resize = dict(self.resize, scale=(width, height), keep_ratio=False)
        return TRANSFORMS.build(resize)(results)


def _detections(model: Any, outputs: list[Tensor], sample: Any) -> Any:
    dets, labels, *masks = outputs
    height, width = sample.img_shape[:2]
    limits = dets.new_tensor([width, height, width, height])
    scale = dets.new_tensor(sample.scale_factor).repeat(2)
    instances = InstanceData(
        bboxes=dets[:, :4].clamp(min=0).minimum(limits) / scale, scores=dets[:, 4], labels=labels
    )
    if masks:
        inside = masks[0][:, None, :height, :width].float()
        instances.masks = F.interpolate(inside, sample.ori_shape[:2])[:, 0] > 0
    sample.pred_instances = instances
    return sample


def _segments(model: Any, outputs: list[Tensor], sample: Any) -> Any:
    height, width = sample.img_shape[:2]
    maps = outputs[0][..., :height, :width]
    if len(outputs) == 1:
        return model.postprocess_result(maps, [sample])[0]
    labels = F.interpolate(maps[:, None].float(), sample.ori_shape[:2])[0]
    sample.pred_sem_seg = PixelData(data=labels.long())
    return sample
