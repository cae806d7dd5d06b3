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


@pytest.mark.parametrize('name', ['vittt_digits', 'vit3_digits'])
def test_a_classifier_takes_them(name: str) -> None:
    pytest.importorskip('mmpretrain')
    from mmengine.registry import DATASETS, MODELS, init_default_scope

    cfg = load_config(name)
    init_default_scope('mmpretrain')
    data = DATASETS.build(cfg.train_dataloader.dataset)
    model = MODELS.build(cfg.model)
    samples = [data[i] for i in range(4)]
    batch = dict(
        inputs=[s['inputs'] for s in samples], data_samples=[s['data_samples'] for s in samples]
    )
    batch = model.data_preprocessor(batch, training=True)
    assert batch['inputs'].shape == (4, 1, 20, 20)
    assert [int(s.gt_label) for s in batch['data_samples']] == [
        entry['gt_label'] for entry in data.load_data_list()[:4]
    ]
    model(**batch, mode='loss')['loss'].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
