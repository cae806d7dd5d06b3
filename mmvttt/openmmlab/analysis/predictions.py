"""Draws predictions of a detector or a segmentor next to the ground truth."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import nn
from torchvision.utils import make_grid

from mmvttt.analysis.drawing import beside, draw_instances, draw_label_map, with_title
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.checkpoints.read import read_weights
from mmvttt.errors import UsageError

# Smaller images are enlarged by a whole factor until their text can be read.
_READABLE = 480
# Pixels of a grid: the width of one picture, and the gap between two.
_TILE, _GAP = 640, 8
_PREDICTIONS = 'predictions of {:g} or more'
# An image and its sample → titles and pictures.
Draw = Callable[[np.ndarray, Any], Iterator[tuple[str, np.ndarray]]]


def draw_predictions(
    config: Config,
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    num_images: int = 12,
    score_thr: float = 0.3,
    device: str | torch.device = 'cpu',
    first: bool = False,
) -> list[Path]:
    """Writes pictures of test images: ground truth on the left, predictions on the right.

    Only predictions if the set has no annotations. A class has the same colour on both sides. A bar
    on stderr shows the progress.

    Args:
        config: A config of a detector (mmdet) or a segmentor (mmsegmentation), with a test set.
        checkpoint: All of its weights.
        out_dir: Each picture has its image's name, as PNG; of several images with one name all but
            the first also have their index.
        num_images, first: How many images are taken, evenly spread or the first ones.
        score_thr: A detector's predictions below this score are not drawn.
        device: Of the model.
    """
    scope = config.get('default_scope', 'mmdet')
    if scope not in _DRAWINGS:
        raise UsageError(
            f'default_scope is {scope!r}: predictions are drawn of {" and ".join(_DRAWINGS)}; '
            'tools/image_demo.py shows what a classifier sees'
        )
    init_default_scope(scope)
    dataset = DATASETS.build(config.test_dataloader.dataset)
    model = MODELS.build(config.model)
    # Before mmengine fails on a file that is not a checkpoint.
    read_weights(checkpoint)
    load_checkpoint(model, os.fspath(checkpoint), map_location='cpu', strict=True)
    draw = _DRAWINGS[scope](dataset.metainfo, score_thr)
    count = min(num_images, len(dataset))
    chosen = np.linspace(0, (count if first else len(dataset)) - 1, count).round().astype(int)
    predicted = _predict(model.to(device).eval(), dataset, chosen)
    files: list[Path] = []
    shown = track(predicted, 'drawing', count, console=Console(stderr=True))
    for index, (image, sample) in zip(chosen, shown, strict=True):
        file = Path(out_dir) / Path(sample.img_path).with_suffix('.png').name
        files.append(file if file not in files else file.with_stem(f'{file.stem}_{index}'))
        name = Path(sample.img_path).name
        parts = [with_title(part, f'{title}: {name}') for title, part in draw(image, sample)]
        with replacing(files[-1]) as partial:
            Image.fromarray(beside(parts)).save(partial, 'PNG')
    return files


def tile(files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Composes pictures into one, two in a row, each 640 pixels wide, on white."""
    pictures = []
    for file in files:
        picture = cv2.imread(os.fspath(file))
        height = max(1, round(len(picture) * _TILE / picture.shape[1]))
        pictures.append(cv2.resize(picture, (_TILE, height), interpolation=cv2.INTER_AREA))
    height = max(map(len, pictures))
    tiles = torch.full((len(pictures), 3, height, _TILE), 255, dtype=torch.uint8)
    for part, picture in zip(tiles, pictures, strict=True):
        part[:, : len(picture)] = torch.from_numpy(picture).permute(2, 0, 1)
    grid = make_grid(tiles, nrow=2, padding=_GAP, pad_value=255).permute(1, 2, 0)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(os.fspath(out), grid.numpy())
    return Path(out)


@torch.inference_mode()
def _predict(
    model: nn.Module, dataset: torch.utils.data.Dataset, indices: np.ndarray
) -> Iterator[tuple[np.ndarray, Any]]:
    """The images `(H, W, 3)` RGB at their own size, with predictions and ground truth in it.

    The test pipelines load annotations after the resize, so that they have the original size.
    """
    from mmcv import imread

    for index in indices:
        (sample,) = model.test_step(pseudo_collate([dataset[int(index)]]))
        yield imread(sample.img_path, channel_order='rgb'), sample.cpu()


def _objects(meta: dict[str, Any], score_thr: float) -> Draw:
    """Draws boxes and masks."""

    def draw(image: np.ndarray, sample: Any) -> Iterator[tuple[str, np.ndarray]]:
        factor = _factor(image)
        large = _repeat(image, factor, axis=0)
        for title, part in (('truth', 'gt_instances'), (_PREDICTIONS, 'pred_instances')):
            objects = sample.get(part)
            if 'bboxes' not in objects:
                continue
            scores = objects.get('scores')
            if scores is not None:
                title, objects = title.format(score_thr), objects[scores >= score_thr]
            masks = objects.get('masks')
            if masks is not None:
                masks = np.asarray(getattr(masks, 'masks', masks), bool)
                masks = _repeat(masks, factor, axis=1)
            yield (
                title,
                draw_instances(
                    large,
                    factor * np.asarray(getattr(objects.bboxes, 'tensor', objects.bboxes)),
                    objects.labels.tolist(),
                    meta['classes'],
                    None if scores is None else objects.scores.tolist(),
                    masks,
                    _palette(meta),
                ),
            )

    return draw


def _labels(meta: dict[str, Any], score_thr: float) -> Draw:
    """Draws label maps; there are no scores."""

    def draw(image: np.ndarray, sample: Any) -> Iterator[tuple[str, np.ndarray]]:
        factor = _factor(image)
        for title, part in (('truth', 'gt_sem_seg'), ('predictions', 'pred_sem_seg')):
            if part in sample:
                labels = _repeat(sample.get(part).data[0].numpy(), factor, axis=0)
                large = _repeat(image, factor, axis=0)
                yield title, draw_label_map(large, labels, meta['classes'], _palette(meta))

    return draw


_DRAWINGS = {'mmdet': _objects, 'mmseg': _labels}


def _palette(meta: dict[str, Any]) -> Any:
    """The data set's colours, if it has one for each class."""
    colours = meta.get('palette')
    return colours if isinstance(colours, list) and len(colours) == len(meta['classes']) else None


def _factor(image: np.ndarray) -> int:
    return -(-_READABLE // min(image.shape[:2]))


def _repeat(pixels: np.ndarray, factor: int, axis: int) -> np.ndarray:
    """Every pixel `factor` times along `axis` and the axis after it."""
    return pixels.repeat(factor, axis=axis).repeat(factor, axis=axis + 1)
