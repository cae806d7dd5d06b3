"""Confusion matrices of tools/test.py --mistakes, counted by hand; boxes merged by --tta."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis import mistakes
from mmvttt.openmmlab.analysis.mistakes import Mistakes, precision_curves


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
    actual = torch.tensor([[[0, 1, 1], [0, 0, 1]]])
    sample = dict(gt_sem_seg=dict(data=truth), pred_sem_seg=dict(data=actual))
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


def rows(*boxes: tuple) -> np.ndarray:
    return np.array(boxes, float).reshape(-1, 6)


def test_precision_over_recall() -> None:
    pytest.importorskip('pycocotools')
    right = rows((0, 0, 10, 10, 0, 0.9), (20, 0, 10, 10, 0, 0.7))
    wrong = rows((50, 0, 10, 10, 0, 0.95), (70, 0, 10, 10, 0, 0.8))
    truth = right * [1, 1, 1, 1, 1, 0]
    elsewhere = rows((50, 0, 10, 10, 1, 0))
    # Wrong, right, wrong, right: 1/2 at half of the recall, where later boxes come to 2/4.
    curves = precision_curves([(truth, right), (elsewhere, wrong)], 2)
    at = [0, 50, 51, 100]
    # Half, because nothing of the second class is detected.
    assert np.allclose(curves['IoU 0.5'][at] * 2, [1 / 2, 1 / 2, 1 / 2, 1 / 2], atol=1e-6)
    # The first wrong box hits the other class.
    forgiven = curves['and of another class'][at] * 2
    assert np.allclose(forgiven, [1, 1, 2 / 3, 2 / 3], atol=1e-6)
    assert np.allclose(curves['and on the background'] * 2, 1)
    # A later box raises the precision at all smaller recalls.
    late = precision_curves([(truth, np.concatenate([right, wrong[:1]]))], 1)['IoU 0.5']
    assert np.allclose(late[at], [2 / 3] * 4, atol=1e-6)


@pytest.mark.parametrize('first_id', [0, 1])
def test_the_curves_have_the_log_s_ap(first_id: int, tmp_path: Path) -> None:
    pytest.importorskip('mmdet')
    from mmdet.datasets import CocoDataset
    from mmdet.evaluation import CocoMetric

    random = np.random.default_rng(0)
    classes = ('cat', 'dog', 'emu')
    # Crowded enough for boxes that overlap several others.
    corners = random.uniform(0, 60, (90, 2))
    boxes = np.concatenate([corners, random.uniform(15, 40, (90, 2))], 1)
    annotations = [
        dict(id=i + first_id, image_id=i // 15, category_id=i % 3 + 1, bbox=box,
             area=box[2] * box[3], iscrowd=int(i % 15 == 14))
        for i, box in enumerate(boxes.tolist())
    ]  # fmt: skip
    images = [dict(id=i, file_name=f'{i}.png', width=200, height=200) for i in range(6)]
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(classes)]
    file = tmp_path / 'boxes.json'
    file.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))
    meta = dict(classes=classes)
    options = dict(metainfo=meta, data_prefix=dict(img='.'), pipeline=[], test_mode=True)
    dataset = CocoDataset(ann_file=str(file), **options)
    metrics = (
        CocoMetric(ann_file=str(file), metric='bbox'),
        Mistakes(str(tmp_path), 'mmdet', dataset),
    )
    samples = []
    for image in range(6):
        near = boxes[15 * image : 15 * image + 15] + random.normal(0, 2, (15, 4))
        ends = np.concatenate([near[:, :2], near[:, :2] + near[:, 2:]], 1)
        objects = dict(
            bboxes=torch.from_numpy(ends).float(),
            scores=torch.from_numpy(random.uniform(0.1, 1, 15)).float(),
            labels=torch.from_numpy(np.where(random.uniform(size=15) < 0.8, np.arange(15) % 3, 0)),
        )
        samples.append(dict(img_id=image, ori_shape=(100, 100), pred_instances=objects))
    for metric in metrics:
        metric.dataset_meta = meta
        metric.process(None, samples)
    curves = precision_curves(metrics[1].results, 3)
    log = metrics[0].evaluate(6)
    for name, key in (('IoU 0.5', 'coco/bbox_mAP_50'), ('IoU 0.75', 'coco/bbox_mAP_75')):
        logged = log[key]
        assert 0.1 < logged < 0.9
        assert curves[name].mean() == pytest.approx(logged, abs=5e-4)
    assert list(curves) == sorted(curves, key=lambda name: curves[name].mean())


@pytest.mark.parametrize('classes', [2, 80])
def test_the_matrix_is_legible(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names, counts, thresholds, and no colour for boxes on the background."""
    figures = []
    monkeypatch.setattr(mistakes, 'save', lambda figure, path: figures.append(figure))
    names = [f'{i}{"a very long name of a class " * 3}'[:60] for i in range(classes)]
    matrix = np.zeros((classes + 1,) * 2, int)
    matrix[0, 0], matrix[0, 1], matrix[-1, 1] = 30, 10, 7
    mistakes._draw_matrix(tmp_path, matrix, [*names, 'background'], 'of score 0.3 or more')
    (figure,) = figures
    panel = figure.axes[0]
    figure.canvas.draw()
    assert [text.get_text() for text in panel.get_yticklabels()] == [
        '0a very lon… a class a v',
        'nothing there',
    ]
    shares = panel.images[0].get_array()
    assert shares[0, :2].tolist() == [75, 25]
    assert np.ma.masked_invalid(shares[1]).mask.all()
    assert {text.get_text() for text in panel.texts} == (
        {'30', '10', '7'} if classes == 2 else set()
    )
    assert figure.get_suptitle() == 'of score 0.3 or more'
    boxes = [text.get_window_extent() for text in panel.get_xticklabels()]
    assert min(box.height for box in boxes) > 0
    assert figure.bbox.y0 <= min(box.y0 for box in boxes)


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
