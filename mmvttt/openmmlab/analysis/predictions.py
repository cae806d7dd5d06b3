"""Draws predictions of a detector or a segmentor next to the ground truth."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb
from matplotlib.patches import Patch, Rectangle
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import nn

from mmvttt.analysis.pictures import cut_middle, panels, save, styled
from mmvttt.checkpoints.read import read_weights
from mmvttt.errors import UsageError

# Pixels of a grid: the width of one picture, and the gap between two.
_TILE, _GAP = 640, 8
# Opacity of masks and label maps.
_MASK, _MAP = 0.45, 0.6
# Parts of a sample with the ground truth and the predictions.
_PARTS = dict(mmdet=('gt_instances', 'pred_instances'), mmseg=('gt_sem_seg', 'pred_sem_seg'))


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
    if scope not in _PARTS:
        raise UsageError(
            f'default_scope is {scope!r}: predictions are drawn of {" and ".join(_PARTS)}; '
            'tools/image_demo.py shows what a classifier sees'
        )
    init_default_scope(scope)
    dataset = DATASETS.build(config.test_dataloader.dataset)
    model = MODELS.build(config.model)
    # Before mmengine fails on a file that is not a checkpoint.
    read_weights(checkpoint)
    load_checkpoint(model, os.fspath(checkpoint), map_location='cpu', strict=True)
    count = min(num_images, len(dataset))
    chosen = np.linspace(0, (count if first else len(dataset)) - 1, count).round().astype(int)
    predicted = _predict(model.to(device).eval(), dataset, chosen)
    files: list[Path] = []
    shown = track(predicted, 'drawing', count, console=Console(stderr=True))
    for index, (image, sample) in zip(chosen, shown, strict=True):
        file = Path(out_dir) / Path(sample.img_path).with_suffix('.png').name
        files.append(file if file not in files else file.with_stem(f'{file.stem}_{index}'))
        _draw(files[-1], image, sample, scope, dataset.metainfo, score_thr)
    return files


def tile(files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Composes pictures into one, two in a row, each 640 pixels wide, on white."""
    pictures = [Image.open(file).convert('RGB') for file in files]
    pictures = [p.resize((_TILE, max(1, round(p.height * _TILE / p.width)))) for p in pictures]
    columns, width = min(2, len(pictures)), _TILE + _GAP
    height = max(picture.height for picture in pictures) + _GAP
    size = columns * width + _GAP, -(-len(pictures) // columns) * height + _GAP
    sheet = Image.new('RGB', size, 'white')
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (_GAP + i % columns * width, _GAP + i // columns * height))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out)
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


@styled
def _draw(
    file: Path, image: np.ndarray, sample: Any, scope: str, meta: dict[str, Any], score_thr: float
) -> None:
    names = list(meta['classes'])
    palette = meta.get('palette')
    if isinstance(palette, list) and len(palette) == len(names):
        colours = np.array(palette) / 255
    else:
        # Hues that are the golden ratio apart.
        colours = hsv_to_rgb([((0.02 + 0.618034 * i) % 1, 0.8, 0.9) for i in range(len(names))])
    # A test set without annotations has no `gt_…`, or no boxes in it.
    parts = [
        n for n in _PARTS[scope] if n in sample and (scope == 'mmseg' or 'bboxes' in sample.get(n))
    ]
    size = (6.4, 6.4 * image.shape[0] / image.shape[1] + 0.4)
    figure, axes = panels(1, len(parts), size)
    legend: dict[str, Patch] = {}
    for panel, name in zip(axes, parts, strict=True):
        panel.imshow(image)
        panel.axis('off')
        title = 'truth' if name.startswith('gt') else 'predictions'
        if scope == 'mmdet':
            if title != 'truth':
                title += f' of {score_thr:g} or more'
            _draw_objects(panel, sample.get(name), names, colours, score_thr)
        else:
            labels = sample.get(name).data[0].numpy()
            _draw_labels(panel, labels, colours)
            for i in np.unique(labels[labels < len(names)]).tolist():
                legend[names[i]] = Patch(color=colours[i], label=cut_middle(names[i], 24))
        panel.set_title(cut_middle(f'{title}: {Path(sample.img_path).name}', 60), fontsize=11)
    if legend:
        figure.legend(handles=list(legend.values()), loc='outside lower center', ncols=4)
    save(figure, file, dpi=100)


def _draw_objects(
    panel: Axes, objects: Any, names: Sequence[str], colours: np.ndarray, score_thr: float
) -> None:
    """Draws masks and boxes, with class and score above a box: a small object stays visible."""
    if 'scores' in objects:
        objects = objects[objects.scores >= score_thr]
    masks = objects.get('masks')
    if masks is not None:
        for label, mask in zip(objects.labels, getattr(masks, 'masks', masks), strict=True):
            colour = np.append(colours[label], _MASK)
            panel.imshow(np.asarray(mask, bool)[..., None] * colour)
    boxes = np.asarray(getattr(objects.bboxes, 'tensor', objects.bboxes))
    for i, ((x1, y1, x2, y2), label) in enumerate(zip(boxes.tolist(), objects.labels, strict=True)):
        colour, text = colours[label], cut_middle(names[label], 24)
        if 'scores' in objects:
            text += f' {objects.scores[i]:.2f}'
        box = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colour, linewidth=2)
        panel.add_patch(box)
        dark = colour @ (0.299, 0.587, 0.114) < 0.5
        panel.text(x1, y1, text, va='bottom', fontsize=9, color='white' if dark else 'black',
                   bbox=dict(facecolor=colour, edgecolor='none', pad=1))  # fmt: skip


def _draw_labels(panel: Axes, labels: np.ndarray, colours: np.ndarray) -> None:
    """Colours an image by a label map `(H, W)`; pixels without a class are darkened."""
    there = labels < len(colours)
    paint = np.where(there[..., None], colours[np.where(there, labels, 0)], 0)
    panel.imshow(np.dstack([paint, np.full(labels.shape, _MAP)]))
