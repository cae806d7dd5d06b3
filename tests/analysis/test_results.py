"""Confusion matrices and COCO's types of errors, of predictions that are known."""

from pathlib import Path

import mmengine
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from mmvttt.analysis import results
from mmvttt.analysis.results import analyze
from mmvttt.datasets import make_digits
from mmvttt.errors import UsageError

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def test_a_detector_that_takes_every_1_for_a_7(tmp_path: Path) -> None:
    root = make_digits(tmp_path / 'set', 1, 3, 96)
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_demo.py')
    cfg.test_dataloader.dataset.data_root = str(root)
    cfg.test_evaluator.ann_file = str(root / 'annotations/instances_val.json')
    cfg.test_evaluator.update(metric='bbox', type='mmdet.CocoMetric')
    cfg.test_evaluator = [dict(type='DumpDetResults', out_file_path='x.pkl'), cfg.test_evaluator]
    init_default_scope('mmdet')
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    samples, truth = [], []
    for i in range(len(dataset)):
        info = dataset.get_data_info(i)
        labels = torch.tensor([x['bbox_label'] for x in info['instances']])
        truth += labels.tolist()
        samples.append(
            dict(
                img_id=info['img_id'],
                ori_shape=(info['height'], info['width']),
                pred_instances=dict(
                    bboxes=torch.tensor([x['bbox'] for x in info['instances']]),
                    labels=torch.where(labels == 1, 7, labels),
                    scores=torch.ones(len(labels)),
                ),
            )
        )
    mmengine.dump(samples, tmp_path / 'test.pkl')
    pictures = analyze(cfg, tmp_path / 'test.pkl', tmp_path / 'out')
    assert all(path.stat().st_size > 1000 for path in pictures)
    assert (tmp_path / 'out/bbox/bbox-allclass-allarea.png') in pictures
    matrix = results._of_boxes(dataset, samples, 10, 0.3)
    for digit in range(10):
        # Boxes that overlap by half count twice, so at least.
        assert matrix[digit, 7 if digit == 1 else digit] >= truth.count(digit)
    assert matrix[1, 1] == 0
    mmengine.dump(samples[:2], tmp_path / 'test.pkl')
    with pytest.raises(UsageError, match='2 predictions, the test set of the config 3 images'):
        analyze(cfg, tmp_path / 'test.pkl', tmp_path / 'out')


class Unlabelled:
    """A set of mmdet whose annotations list images alone."""

    def get_data_info(self, index: int) -> dict:
        return dict(instances=[])


@pytest.mark.parametrize(
    ('kind', 'samples', 'message'),
    [
        ('mmdet', [dict(pred_instances=dict())], 'has no labels to compare'),
        ('mmseg', [dict(pred_sem_seg=dict(data=np.zeros((1, 1))))], 'has no labels to compare'),
        ('mmpretrain', [dict(pred_score=torch.ones(2))], 'has no labels to compare'),
        ('mmpretrain', [dict(gt_label=torch.tensor([0, 1]))], 'images of several labels'),
    ],
)
def test_what_cannot_be_compared(kind: str, samples: list, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        results._MATRICES[kind](Unlabelled(), samples, 2, 0.3)


def test_pixels_without_a_label_do_not_count() -> None:
    truth = np.array([[0, 0, 1, 255]])
    sample = dict(gt_sem_seg=dict(data=truth), pred_sem_seg=dict(data=np.array([[0, 1, 1, 1]])))
    assert results._of_pixels(None, [sample], 2, 0.3).tolist() == [[1, 1], [0, 1]]


def test_images_are_counted_by_mmpretrain() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    samples = [
        dict(gt_label=torch.tensor([truth]), pred_score=score, pred_label=score.argmax()[None])
        for truth, score in zip([0, 1, 1], scores, strict=True)
    ]
    assert results._of_images(None, samples, 2, 0.3).tolist() == [[1, 0], [1, 1]]
