"""mmdet's COCO evaluation by faster-coco-eval."""

import sys
from types import SimpleNamespace

import pytest
from mmdet.evaluation.metrics import coco_metric
from pycocotools.cocoeval import COCOeval

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


def test_the_faster_evaluator_has_the_same_numbers() -> None:
    faster = pytest.importorskip('faster_coco_eval')
    truth, boxes = coco_metric.COCO(), [[10, 10, 20, 30], [40, 20, 25, 15], [60, 60, 9, 40]]
    truth.dataset = dict(
        images=[dict(id=0, width=99, height=99, file_name='a.jpg')],
        categories=[dict(id=1, name='cat')],
        annotations=[
            dict(id=i, image_id=0, category_id=1, bbox=box, area=box[2] * box[3], iscrowd=0)
            for i, box in enumerate(boxes)
        ],
    )
    truth.createIndex()
    shifts = (1, 4, 30)
    results = [
        dict(image_id=0, category_id=1, bbox=[x + d, *rest], score=1 - 0.1 * d / 30)
        for (x, *rest), d in zip(boxes, shifts, strict=True)
    ]
    stats = []
    for evaluator in (COCOeval, faster.COCOeval_faster):
        evaluation = evaluator(truth, truth.loadRes(results), 'bbox')
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        stats.append(list(evaluation.stats[:12]))
    assert stats[0] == pytest.approx(stats[1], abs=1e-12)
    assert 0.1 < stats[0][0] < 0.9
