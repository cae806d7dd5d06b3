"""COCO evaluation: ids from 0, files without `info`, the faster evaluator, and no forty lines."""

from functools import wraps
from typing import Any

from .patch import replace


def index_all() -> None:
    """Makes mmdet's COCO count annotations from 1: COCOeval takes id 0 for "not matched".

    pycocotools 2.0.9 and 2.0.10 also need `info` when results are loaded.
    """
    from mmdet.datasets.api_wrappers.coco_api import COCO

    original = COCO.createIndex

    @wraps(original)
    def create_index(self: Any) -> None:
        if isinstance(self.dataset, dict):
            self.dataset.setdefault('info', {})
            annotations = self.dataset.get('annotations') or []
            ids = [ann.get('id') for ann in annotations if isinstance(ann, dict)]
            if 0 in ids and all(type(i) is int for i in ids):
                for ann in annotations:
                    ann['id'] += 1
        original(self)

    replace(COCO, 'createIndex', create_index)


def evaluate_faster() -> str | None:
    """Lets mmdet's CocoMetric evaluate by faster-coco-eval, which has the same interface."""
    try:
        from faster_coco_eval import COCOeval_faster
    except ImportError:
        return 'faster-coco-eval is not installed'
    from mmdet.evaluation.metrics import coco_metric

    replace(coco_metric, 'COCOeval', COCOeval_faster)
    return None


def silence() -> None:
    """Keeps pycocotools from printing: CocoMetric returns its results, for one line of the log."""
    from pycocotools import coco, cocoeval

    for module in (coco, cocoeval):
        replace(module, 'print', lambda *_, **__: None)
