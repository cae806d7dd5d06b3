"""mmdet's COCO evaluation by faster-coco-eval."""

import sys
from types import SimpleNamespace

import pytest
from mmdet.evaluation.metrics import coco_metric

from mmvttt.openmmlab.compat.coco import evaluate_faster


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
