"""Segmentation, by mmsegmentation: label maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ..export.networks import Labels, logits_of_segmentor, to_label_map
from .prediction import LabelMap
from .task import Start, Task


class Segmentation(Task):
    """A class for each pixel."""

    toolbox = 'mmseg'
    size = (512, 512)
    heads = ('decode_head', 'auxiliary_head')
    published_on = 'ADE20KDataset'
    dataset = 'BaseSegDataset', ('load_data_list',)
    format = 'maps'
    measures: ClassVar = {'maps': ('mIoU',)}
    starts = (
        Start(
            'upernet_hvit3_t_finetune', 'mmvttt://upernet_hvit3_t_160k', size=(256, 342),
            crop=(256, 256), freeze=dict(frozen_stages=4),
            gpu=dict(size=(512, 683), crop=(512, 512), batch=4),
        ),
        Start('fpn_vittt_nano_finetune', None, 1e-3, 4, (180, 240), (160, 160)),
    )  # fmt: skip

    def class_count(self, model: Any) -> int:
        """Number of classes of the decoder; the last head of a cascade, such as OCRNet's."""
        head: Any = model.decode_head
        if isinstance(head, nn.ModuleList):
            head = head[-1]
        return head.num_classes

    def predicted(
        self, sample: Any, image: np.ndarray, classes: Sequence[str], score_thr: float, palette: Any
    ) -> LabelMap:
        """The label map."""
        # mmseg's label map of a binary segmentor is of floating-point numbers.
        labels = sample.pred_sem_seg.data[0].numpy().astype(np.int64)
        return LabelMap(image, classes, labels, palette=palette)

    def by_class(
        self, classes: Sequence[str], metrics: Mapping[str, Any], results: Sequence[Any]
    ) -> dict[str, list]:
        """IoU. The metric collects areas by class: shared, of either, predicted and labelled."""
        shared, union, _, labelled = (torch.stack(areas) for areas in zip(*results, strict=True))
        iou = shared.sum(0) / union.sum(0)
        return dict(values=iou.tolist(), pictures=(labelled > 0).sum(0).tolist())

    def show(self, cfg: Any, hook: Any, folder: str) -> None:
        """Sets mmsegmentation's hook, which leaves the folder to the visualizer."""
        hook.update(draw=True, interval=1)
        cfg.visualizer.save_dir = folder

    def exportable(self, model: Any) -> Any:
        """The model up to its logits at the size of the image."""
        return logits_of_segmentor(model)

    def predictions(self, model: Any) -> Any:
        """The label of each pixel and its score."""
        return Labels(model)

    def by_file(self, model: Any, file: Any, images: Any, samples: Sequence[Any]) -> list[Any]:
        """Label maps at the size of the photograph."""
        pairs = zip(images, samples, strict=True)
        return [to_label_map(model, file(*pair), pair[1]) for pair in pairs]
