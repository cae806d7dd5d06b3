"""Files of `tools/export.py` in the place of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch.nn.functional as F
from mmengine.structures import InstanceData, PixelData
from torch import Tensor, nn

from mmvttt.deploy.runtime import PREPARATION, ExportedFile, open_exported
from mmvttt.errors import UsageError

from ..reliability.fit import numbers


def run_file(
    model: nn.Module,
    pipelines: Iterable[list[Any]],
    path: str | os.PathLike[str],
    amp: bool = False,
) -> None:
    """Makes a model of mmdet, mmsegmentation or mmpretrain predict by an `.onnx` or `.xml`.

    For a file of one size, `Resize` among the transforms of the pipelines is replaced: the image is
    resized to fit into it, and filled with zeros at the right and below. With `amp` OpenVINO
    computes in bf16. A UsageError says that the file or, later, an image does not fit.
    """
    file = open_exported(path, 'bfloat16' if amp else 'float32')
    require_same_preparation(file, model.data_preprocessor)
    if hasattr(model, 'decode_head'):
        predict = _segments
    elif any(hasattr(model, f'{kind}_head') for kind in ('bbox', 'roi', 'panoptic')):
        predict = _detections
    else:
        model.extract_feat = file.forward
        model.head.forward = itemgetter(0)
        return
    if predict is _detections and file.names[0] != 'dets':
        raise UsageError(
            f'{file.path!r} ends at the maps of the neck: write it with '
            'tools/export.py --predictions'
        )

    def fitted(inputs: Tensor, samples: Sequence[Any], **_: Any) -> list[Any]:
        results = []
        for image, sample in zip(inputs.split(1), samples, strict=True):
            height, width = sample.img_shape[:2]
            if file.size is not None and (height > file.size[0] or width > file.size[1]):
                raise UsageError(
                    f'{file.path!r} takes images of {file.size[0]}×{file.size[1]}, and the '
                    f'pipeline makes one of {height}×{width}: it needs the step Resize, which is '
                    'fitted to the file'
                )
            image = image[:, :, :height, :width]
            if file.size is not None:
                image = F.pad(image, (0, file.size[1] - width, 0, file.size[0] - height))
            # The padding of the preprocessor is cut off above.
            sample.set_metainfo(dict(img_padding_size=[0] * 4, padding_size=[0] * 4))
            results.append(predict(model, file(image), sample))
        return results

    model.predict = fitted
    for transforms in pipelines if file.size is not None else ():
        for i, step in enumerate(transforms):
            if type(step).__name__ == 'Resize':
                transforms[i] = _Fit(step, file.size)


def require_same_preparation(file: ExportedFile, preprocessor: Any) -> None:
    """Compares mean, deviation and order of channels in a file's notes with a preprocessor's.

    Raises:
        UsageError: They differ, so that the file would see other numbers than its model.
    """
    if 'mean' not in file.notes:
        # Written from a model without a config, or by another program.
        return
    saved = {k: json.loads(file.notes[k]) for k in PREPARATION if k in file.notes}
    swaps = ('_channel_conversion', 'channel_conversion', 'to_rgb')
    facts: dict[str, tuple[Any, Any]] = {
        name: (numbers(saved.get(name)), numbers(getattr(preprocessor, name, None)))
        for name in ('mean', 'std')
    }
    swapped = any(getattr(preprocessor, name, False) for name in swaps)
    facts['RGB'] = bool(saved.get('bgr_to_rgb') or saved.get('to_rgb')), swapped
    for name, (there, here) in facts.items():
        if np.shape(there) != np.shape(here) or not np.allclose(there, here, rtol=1e-3):
            raise UsageError(
                f'{file.path!r} was exported for images with {name}={there}, and the '
                f"data_preprocessor here has {name}={here}: give the export's config"
            )


class _Fit:
    """A pipeline's `Resize` to the largest size of the same ratio inside `size`."""

    def __init__(self, resize: Any, size: tuple[int, int]) -> None:
        self.resize, self.size = resize, size

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        sides = results['img'].shape[:2]
        factor = min(np.divide(self.size, sides))
        height, width = (max(1, int(side * factor + 0.5)) for side in sides)
        self.resize.scale, self.resize.keep_ratio = (width, height), False
        return self.resize(results)


def _detections(model: nn.Module, outputs: list[Tensor], sample: Any) -> Any:
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


def _segments(model: nn.Module, outputs: list[Tensor], sample: Any) -> Any:
    height, width = sample.img_shape[:2]
    maps = outputs[0][..., :height, :width]
    if len(outputs) == 1:
        return model.postprocess_result(maps, [sample])[0]
    labels = F.interpolate(maps[:, None].float(), sample.ori_shape[:2])[0]
    sample.pred_sem_seg = PixelData(data=labels.long())
    return sample
