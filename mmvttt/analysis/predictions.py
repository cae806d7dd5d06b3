"""Draws a detector's predictions beside the ground truth. Needs mmdet."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from mmdet.registry import DATASETS, MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmdet.visualization import DetLocalVisualizer
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint
from torch import nn

from ..checkpoints.read import read_weights

# Smaller images are enlarged by a whole factor until their text can be read.
_READABLE = 480


def draw_predictions(
    config: Config,
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    num_images: int = 12,
    score_thr: float = 0.3,
    device: str | torch.device = 'cpu',
) -> list[Path]:
    """Writes pictures of test images: ground truth on the left, predictions on the right.

    Args:
        config: of a detector; `test_dataloader.dataset` gives the images, which need annotations.
        checkpoint: its weights; every parameter must be there.
        out_dir: folder of the pictures, made if missing. Each has its image's name, as PNG.
        num_images: how many images, evenly spread over the set; all where it has fewer.
        score_thr: predictions below this score are not drawn.
        device: where the detector runs.

    Returns:
        The files written.

    Raises:
        FileNotFoundError: without that checkpoint, or without the data.
        CheckpointError: if the checkpoint cannot be read.
        RuntimeError: if the checkpoint is not of this detector.
        ValueError: for `num_images` below 1.
    """
    if num_images < 1:
        raise ValueError(f'num_images={num_images}: pass 1 or more')
    init_default_scope(config.get('default_scope', 'mmdet'))
    dataset = DATASETS.build(config.test_dataloader.dataset)
    model = MODELS.build(config.model)
    # Before mmengine stumbles over what is no checkpoint.
    read_weights(checkpoint)
    load_checkpoint(model, os.fspath(checkpoint), map_location='cpu', strict=True)
    visualizer = DetLocalVisualizer('predictions', alpha=0.5)
    visualizer.dataset_meta = dataset.metainfo
    files = []
    chosen = np.linspace(0, len(dataset) - 1, min(num_images, len(dataset))).round().astype(int)
    for image, sample in _predict(model.to(device).eval(), dataset, chosen):
        image, sample = _enlarge(image, sample)
        path = Path(out_dir) / Path(sample.img_path).with_suffix('.png').name
        with warnings.catch_warnings():
            # Boxes and outlines that touch the border are meant to.
            warnings.filterwarnings('ignore', message='.*is out of bounds')
            visualizer.add_datasample(
                path.stem, image, sample, out_file=os.fspath(path), pred_score_thr=score_thr
            )
        files.append(path)
    return files


@torch.inference_mode()
def _predict(
    model: nn.Module, dataset: torch.utils.data.Dataset, indices: np.ndarray
) -> Iterator[tuple[np.ndarray, DetDataSample]]:
    """The images `(H, W, 3)` RGB at their own size, with predictions and ground truth in it.

    mmdet's test pipelines load annotations after the resize, so that those too keep the own size.
    """
    from mmcv import imread

    for index in indices:
        (sample,) = model.test_step(pseudo_collate([dataset[int(index)]]))
        yield imread(sample.img_path, channel_order='rgb'), sample.cpu()


def _enlarge(image: np.ndarray, sample: DetDataSample) -> tuple[np.ndarray, DetDataSample]:
    factor = -(-_READABLE // min(image.shape[:2]))
    for instances in (sample.gt_instances, sample.pred_instances):
        instances.bboxes = instances.bboxes * factor
        if 'masks' in instances:
            masks = instances.masks
            masks = masks.masks if isinstance(masks, BitmapMasks) else masks.numpy()
            instances.masks = torch.from_numpy(_repeat(masks, factor, axis=1))
    return _repeat(image, factor, axis=0), sample


def _repeat(pixels: np.ndarray, factor: int, axis: int) -> np.ndarray:
    """Every pixel `factor` times along `axis` and the axis after it."""
    return pixels.repeat(factor, axis=axis).repeat(factor, axis=axis + 1)
