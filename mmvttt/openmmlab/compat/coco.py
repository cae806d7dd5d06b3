"""Files in COCO's format as other programs write them: ids from 0, and without `info`."""

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
