"""Confusion matrices of tools/test.py --mistakes, counted by hand; boxes merged by --tta."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.mistakes import Mistakes, _precision


def table(folder: Path) -> list[list[str]]:
    assert (folder / 'confusion_matrix.png').stat().st_size
    with open(folder / 'confusion_matrix.csv') as file:
        return list(csv.reader(file))


def counted(metric: Mistakes, samples: list[dict], classes: tuple | None) -> list[list[int]]:
    metric.dataset_meta = dict(classes=classes) if classes else {}
    metric.process(None, samples)
    metric.evaluate(len(samples))
    names, *rows = table(metric.folder)
    assert [row[0] for row in rows] == names[1:]
    return [[int(cell) for cell in row[1:]] for row in rows]


@pytest.mark.parametrize('classes', [('cat', 'dog', 'emu'), None])
def test_images(classes: tuple | None, tmp_path: Path) -> None:
    # The label of the first version of an image that --tta merged is stale.
    samples = [
        dict(gt_label=torch.tensor([t]), pred_score=torch.eye(3)[p], pred_label=torch.tensor([0]))
        for t, p in ((0, 0), (0, 1), (2, 1), (2, 2), (2, 1))
    ]
    metric = Mistakes(str(tmp_path), 'mmpretrain')
    assert counted(metric, samples, classes) == [[1, 1, 0], [0, 0, 0], [0, 2, 1]]
    with pytest.raises(UsageError, match='several labels'):
        metric.process(None, [dict(samples[0], gt_label=torch.tensor([0, 1]))])
    with pytest.raises(UsageError, match='no labels'):
        metric.process(None, [dict(pred_score=torch.ones(3))])


def test_pixels(tmp_path: Path) -> None:
    truth = torch.tensor([[[0, 0, 1], [1, 255, 255]]], dtype=torch.uint8)
    found = torch.tensor([[[0, 1, 1], [0, 0, 1]]])
    sample = dict(gt_sem_seg=dict(data=truth), pred_sem_seg=dict(data=found))
    metric = Mistakes(str(tmp_path), 'mmseg')
    assert counted(metric, [sample, sample], ('a', 'b')) == [[2, 2], [2, 2]]


class Boxes:
    """A detector's data set of two images."""

    truth = (
        [((0, 0, 10, 10), 0, 0), ((20, 0, 30, 10), 1, 0), ((0, 50, 90, 90), 0, 1)],
        [((0, 0, 10, 10), 0, 0)],
    )

    def __len__(self) -> int:
        return 2

    def get_data_info(self, index: int) -> dict:
        boxes = [dict(bbox=list(b), bbox_label=c, ignore_flag=i) for b, c, i in self.truth[index]]
        return dict(img_id=index + 7, instances=boxes)


def found(image: int, *boxes: tuple) -> dict:
    places, scores, labels = zip(*boxes, strict=True) if boxes else ((), (), ())
    return dict(
        img_id=image,
        pred_instances=dict(
            bboxes=torch.tensor(places, dtype=torch.float32).reshape(-1, 4),
            scores=torch.tensor(scores),
            labels=torch.tensor(labels, dtype=torch.long),
        ),
    )


def test_boxes(tmp_path: Path) -> None:
    pytest.importorskip('mmdet')
    samples = [
        found(
            7,
            ((0, 0, 10, 9), 0.9, 0),  # found
            ((0, 0, 10, 10), 0.5, 1),  # a second box for what is taken: background
            ((20, 0, 30, 10), 0.8, 0),  # of the wrong class
            ((10, 60, 40, 80), 0.9, 1),  # in a crowd
            ((60, 0, 70, 10), 0.2, 1),  # of a low score
        ),
        found(8),
    ]
    metric = Mistakes(str(tmp_path), 'mmdet', Boxes())
    assert counted(metric, samples, ('cat', 'dog')) == [[1, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert (tmp_path / 'precision_recall.png').stat().st_size


def test_precision_over_recall() -> None:
    pytest.importorskip('mmdet')
    nothing = np.zeros((0, 4), np.float32)
    boxes = np.array([[0, 0, 10, 10], [20, 0, 30, 10]], np.float32)
    truth = dict(
        bboxes=boxes, labels=np.array([0, 0]), bboxes_ignore=nothing, labels_ignore=np.zeros(0, int)
    )
    empty = dict(truth, bboxes=nothing, labels=np.zeros(0, int))
    scored = np.hstack([boxes, [[0.9], [0.7]]]).astype(np.float32)
    wrong = np.array([[50, 0, 60, 10, 0.8]], np.float32)
    found = ([scored, wrong[:0]], [wrong, wrong[:0]])
    grid = np.array([0, 0.5, 0.6, 1])
    precision = _precision((truth, empty), found, 0, 0.5, grid)
    np.testing.assert_allclose(precision, [1, 1, 2 / 3, 2 / 3])
    assert _precision((truth, empty), found, 1, 0.5, grid) is None
    # The wrong box hits one of another class; then, whatever it hits.
    other = dict(truth, bboxes=np.float32([[50, 0, 60, 10]]), labels=np.array([1]))
    for second, forgiven in ((other, 'class'), (empty, 'background')):
        precision = _precision((truth, second), found, 0, 0.5, grid, forgiven)
        np.testing.assert_allclose(precision, [1, 1, 1, 1])
    precision = _precision((truth, empty), found, 0, 0.5, grid, 'class')
    np.testing.assert_allclose(precision, [1, 1, 2 / 3, 2 / 3])


def test_another_scope(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--mistakes: default_scope is 'mmengine'"):
        Mistakes(str(tmp_path), 'mmengine')


def test_tta_merges_the_boxes_of_a_detector_of_masks() -> None:
    """mmdet's own ends with an AssertionError."""
    pytest.importorskip('mmdet')
    from mmdet.structures import DetDataSample
    from mmengine.config import ConfigDict
    from mmengine.model import BaseModel
    from mmengine.structures import InstanceData

    from mmvttt.openmmlab.models.box_tta import BoxTTAModel

    class Detector(BaseModel):
        def forward(self, inputs: object) -> None:
            raise NotImplementedError

    views = []
    for flip, left in ((False, 10.0), (True, 60.0)):
        sample = DetDataSample(
            metainfo=dict(ori_shape=(50, 100), flip=flip, flip_direction='horizontal')
        )
        sample.pred_instances = InstanceData(
            bboxes=torch.tensor([[left, 0, left + 30, 20]]),
            scores=torch.tensor([0.9 - left / 1000]),
            labels=torch.tensor([0]),
            masks=np.ones((1, 50, 100), bool),
        )
        views.append(sample)
    options = ConfigDict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=10)
    model = BoxTTAModel(tta_cfg=options, module=Detector())
    (merged,) = model.merge_preds([views])
    assert merged.pred_instances.bboxes.tolist() == [[10, 0, 40, 20]]
    assert 'masks' not in merged.pred_instances
