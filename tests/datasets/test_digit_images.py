"""The digits as images: the same pictures as `TinyDigits`, and a classifier that learns them."""

import pytest
import torch

from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.datasets import DigitImages, TinyDigits


def test_images_and_labels_are_scikit_learns() -> None:
    digits, images = TinyDigits('test'), DigitImages('test')
    assert len(images) == len(digits) == 360
    assert len(DigitImages()) == 1437
    for i in (0, 359):
        entry = images[i]
        assert entry['img'].shape == (8, 8, 1)
        assert entry['gt_label'] == digits.labels[i]
        image = torch.from_numpy(entry['img'].copy())[..., 0].float() / 127.5 - 1
        torch.testing.assert_close(image, digits.images[i, 0], rtol=0, atol=1 / 127)


def test_a_classifier_s_pipeline_takes_them() -> None:
    pytest.importorskip('mmpretrain')
    from mmengine.registry import DATASETS, MODELS, init_default_scope

    cfg = load_config('vittt_digits')
    init_default_scope('mmpretrain')
    data = DATASETS.build(cfg.train_dataloader.dataset)
    inputs, samples = ([data[i][key] for i in range(4)] for key in ('inputs', 'data_samples'))
    model = MODELS.build(cfg.model)
    batch = model.data_preprocessor(dict(inputs=inputs, data_samples=samples), training=True)
    assert batch['inputs'].shape == (4, 1, 20, 20)
    expected = [entry['gt_label'] for entry in data.load_data_list()[:4]]
    assert [int(s.gt_label) for s in batch['data_samples']] == expected
