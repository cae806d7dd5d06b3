"""mmdet's COCO evaluation: by faster-coco-eval, and of files with ids from 0 or without `info`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmdet.evaluation.metrics import coco_metric
from pycocotools.coco import COCO

from mmvttt.openmmlab.compat.coco import evaluate_faster

from ..data.sets import CLASSES, SIZE, coco, write


def test_the_faster_evaluator_is_taken_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coco_metric, 'COCOeval', coco_metric.COCOeval)
    monkeypatch.setitem(sys.modules, 'faster_coco_eval', None)
    before = coco_metric.COCOeval
    assert evaluate_faster() == 'faster-coco-eval is not installed'
    assert coco_metric.COCOeval is before
    faster = SimpleNamespace(COCOeval_faster=object())
    monkeypatch.setitem(sys.modules, 'faster_coco_eval', faster)
    assert evaluate_faster() is None
    assert coco_metric.COCOeval is faster.COCOeval_faster


def test_perfect_predictions_are_perfect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = COCO.loadRes
    # As in pycocotools 2.0.10.
    monkeypatch.setattr(COCO, 'loadRes', lambda self, r: (self.dataset['info'], load(self, r))[1])
    content = coco()
    for number, ann in enumerate(content['annotations']):
        ann['id'] = number
    write(tmp_path, content)
    metric = coco_metric.CocoMetric(ann_file=str(tmp_path / 'a.json'), metric='bbox')
    metric.dataset_meta = dict(classes=CLASSES)
    for image in range(4):
        own = content['annotations'][2 * image : 2 * image + 2]
        boxes = torch.tensor([ann['bbox'] for ann in own]).float()
        boxes[:, 2:] += boxes[:, :2]
        found = dict(bboxes=boxes, scores=torch.ones(2), labels=torch.arange(2))
        metric.process({}, [dict(img_id=image, ori_shape=SIZE, pred_instances=found)])
    assert metric.evaluate(4)['coco/bbox_mAP'] == pytest.approx(1)
