"""Detection, by mmdet: boxes and masks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..export.networks import Detections, Part, to_instances
from .prediction import Boxes
from .task import Start, Task

_PEDESTRIANS = 'maskrcnn_vittt_nano_pedestrians'


class Detection(Task):
    """Boxes, with masks or without."""

    toolbox = 'mmdet'
    size = (800, 1333)
    heads = (
        'roi_head.bbox_head', 'roi_head.mask_head', 'roi_head.mask_iou_head', 'roi_head.point_head',
        'bbox_head', 'mask_head', 'query_head', 'panoptic_head', 'panoptic_fusion_head',
    )  # fmt: skip
    published_on = 'CocoDataset'
    dataset = 'CocoDataset', ('load_data_list', 'parse_data_info')
    format = 'COCO'
    measures: ClassVar = {
        'boxes': ('coco/bbox_mAP', 'coco/bbox_mAP_50'),
        'masks': ('coco/segm_mAP', 'coco/segm_mAP_50', 'coco/bbox_mAP_50'),
    }
    starts = (
        Start(
            'maskrcnn_hvit3_t_finetune', 'mmvttt://maskrcnn_hvit3_t_3x', size=(384, 512),
            freeze=dict(frozen_stages=4), gpu=dict(size=(640, 1066)),
        ),
        Start(_PEDESTRIANS, f'mmvttt://{_PEDESTRIANS}', 8e-4),
    )  # fmt: skip
    merges_tiles = True
    first_output = 'dets'

    def predicted(
        self, sample: Any, image: np.ndarray, classes: Sequence[str], score_thr: float, palette: Any
    ) -> Boxes:
        """The boxes with scores of `score_thr` or more."""
        instances = sample.pred_instances
        instances = instances[instances.scores >= score_thr]
        scores, labels, boxes = (instances[k].numpy() for k in ('scores', 'labels', 'bboxes'))
        masks = instances.get('masks')
        masks = None if masks is None else np.asarray(masks, bool)
        return Boxes(image, classes, scores, labels, boxes, masks, palette=palette)

    def by_class(
        self, classes: Sequence[str], metrics: Mapping[str, Any], results: Sequence[Any]
    ) -> dict[str, list]:
        """AP of boxes, or of masks where there are some."""
        # With masks, mmdetection's values of boxes are overwritten.
        return dict(values=[metrics.get(f'coco/{name}_precision', math.nan) for name in classes])

    def show(self, cfg: Any, hook: Any, folder: str) -> None:
        """Sets mmdet's hook."""
        # mmdet joins the folder to work_dir/<timestamp>, unless it is absolute.
        hook.update(draw=True, test_out_dir=os.path.abspath(folder))

    def dump(self, out: str) -> Any:
        """mmdet's metric, which encodes masks."""
        from mmdet.evaluation import DumpDetResults

        return DumpDetResults(out_file_path=out)

    def merge_metric(self, metric: Any) -> str | None:
        """Measures boxes, which are merged, and no masks."""
        if 'segm' not in (metric.get('metric') or ()):
            return None
        metric['metric'] = 'bbox'
        return 'boxes and no masks: only boxes are measured'

    def exportable(self, model: Any) -> Any:
        """Backbone and neck: the work of the heads depends on the image."""
        return Part(model)

    def predictions(self, model: Any) -> Any:
        """Boxes, labels and masks."""
        return Detections(model)

    def by_file(self, model: Any, file: Any, images: Any, samples: Sequence[Any]) -> list[Any]:
        """Boxes, labels and masks in the pixels of the photograph."""
        return [to_instances(file(*pair), pair[1]) for pair in zip(images, samples, strict=True)]
