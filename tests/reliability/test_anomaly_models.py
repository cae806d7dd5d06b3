"""The stop at a loss that is not finite, in the models of the three toolboxes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import nn

from mmvttt.registry import MODELS
from mmvttt.reliability.anomaly_hook import AnomalyError, AnomalyHook

from ..configs.test_configs import det_batch, detector

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def stopped(model: nn.Module, batch: dict) -> str:
    """The message at a training step, which leaves the weights as they are."""
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-3))
    AnomalyHook().before_train(SimpleNamespace(model=model, optim_wrapper=wrapper))
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(AnomalyError) as caught:
        model.train().train_step(batch, wrapper)
    after = dict(model.named_parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    return str(caught.value)


def finite(model: nn.Module, batch: dict) -> None:
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-3))
    AnomalyHook().before_train(SimpleNamespace(model=model, optim_wrapper=wrapper))
    assert torch.isfinite(model.train().train_step(batch, wrapper)['loss'])


def named(batch: dict) -> dict:
    for i, sample in enumerate(batch['data_samples']):
        sample.set_metainfo(dict(img_path=f'photo_{i}.jpg'))
    return batch


@pytest.fixture(scope='module')
def mask_rcnn() -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(detector(CONFIGS / 'maskrcnn_vittt_demo.py'))
    model.init_weights()
    return model


def test_mask_rcnn_with_adapter(mask_rcnn: nn.Module) -> None:
    finite(mask_rcnn, named(det_batch()))
    mask_rcnn.neck.fpn_convs[0].conv.weight.data *= 1e30
    mask_rcnn.roi_head.mask_head.convs[0].conv.weight.data *= 1e30
    message = stopped(mask_rcnn, named(det_batch()))
    assert 'loss_mask = ' in message.partition('(finite: ')[0]
    assert 'loss_rpn_cls[0] = ' in message.partition('(finite: ')[2]
    assert 'Images of this batch: photo_0.jpg, photo_1.jpg.' in message
    assert 'goes non-finite is roi_head.mask_head.convs.0.conv (Conv2d): its output is' in message
