"""Draws a data set's samples after its pipeline, with the toolbox's own visualizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS, VISUALIZERS, init_default_scope
from torch import Tensor

from mmvttt.errors import UsageError

from ..models.diffusion_model import refuse_diffusion
from ..reliability.data.paths import check_paths


def browse(
    config: Config,
    out_dir: str | os.PathLike[str],
    split: str = 'train',
    num_images: int = 12,
) -> Iterator[Path]:
    """Writes pictures of samples with their annotations, evenly spread over the set.

    Several views of an image (self-supervised models) are drawn side by side.

    Args:
        config: A config of mmdet, mmsegmentation or mmpretrain.
        out_dir: Folder of the pictures, created if missing; `00042.png` shows sample 42.
        split: 'train', 'val' or 'test'.
        num_images: Number of pictures; all samples if there are fewer.

    Yields:
        The files, once written.

    Raises:
        UsageError: The split has no data set.
        MissingDataError: The data is missing.
    """
    refuse_diffusion(config, 'its samples are latents; tools/generate.py draws images with it')
    loader = config.get(f'{split}_dataloader')
    if loader is None:
        raise UsageError(f'the config has no {split}_dataloader')
    check_paths(config, (split,))
    from mmcv import imresize

    init_default_scope(config.default_scope)
    dataset = DATASETS.build(loader.dataset)
    visualizer = VISUALIZERS.build({'name': 'browse', **config.visualizer, 'vis_backends': None})
    visualizer.dataset_meta = dataset.metainfo
    draw = _DRAWINGS[config.default_scope]
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    chosen = np.linspace(0, len(dataset) - 1, min(num_images, len(dataset))).round().astype(int)
    for index in chosen:
        item = dataset[int(index)]
        views = item['inputs'] if isinstance(item['inputs'], list) else [item['inputs']]
        image = _side_by_side(views)
        sample = item['data_samples']
        if split != 'train' and 'ori_shape' in sample:
            # In evaluation, annotations keep the size of the image before its resize.
            height, width = sample.ori_shape[:2]
            image = imresize(image, (width, height))
        path = Path(out_dir) / f'{index:05}.png'
        draw(visualizer, image, sample, os.fspath(path))
        yield path


def _side_by_side(views: list[Tensor]) -> np.ndarray:
    """Views `(C, H, W)` of an image, BGR as in mmengine → `(H, W, 3)` RGB, on white."""
    height = max(view.shape[1] for view in views)
    columns = [
        np.pad(
            view.permute(1, 2, 0).numpy()[..., ::-1],
            ((0, height - view.shape[1]), (0, 0), (0, 0)),
            constant_values=255,
        )
        for view in views
    ]
    return np.ascontiguousarray(np.concatenate(columns, 1))


def _draw_boxes(visualizer: Any, image: np.ndarray, sample: Any, out_file: str) -> None:
    instances = sample.gt_instances
    instances.bboxes = getattr(instances.bboxes, 'tensor', instances.bboxes)
    if 'masks' in instances:
        instances.masks = instances.masks.to_ndarray().astype(bool)
    visualizer.add_datasample(out_file, image, sample, draw_pred=False, out_file=out_file)


def _draw_labels(visualizer: Any, image: np.ndarray, sample: Any, out_file: str) -> None:
    visualizer.add_datasample(out_file, image, sample, draw_pred=False, out_file=out_file)


def _draw_class(visualizer: Any, image: np.ndarray, sample: Any, out_file: str) -> None:
    classes = visualizer.dataset_meta.get('classes')
    visualizer.visualize_cls(image, sample, classes=classes, draw_pred=False, out_file=out_file)


_DRAWINGS = {'mmdet': _draw_boxes, 'mmseg': _draw_labels, 'mmpretrain': _draw_class}
