"""The stop at a loss that is not finite, in the models of the three toolboxes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from torch import nn

from mmvttt.reliability.anomaly_hook import AnomalyError, AnomalyHook

from ..configs.reduced import batch_for, build, reduce_model

CONFIG = Path(__file__).resolve().parents[2] / 'configs/maskrcnn_vittt_demo.py'


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


def batch(cfg: Config) -> dict:
    found = batch_for(cfg)
    for i, sample in enumerate(found['data_samples']):
        sample.set_metainfo(dict(img_path=f'photo_{i}.jpg'))
    return found


def test_mask_rcnn_with_adapter() -> None:
    cfg = reduce_model(Config.fromfile(CONFIG))
    mask_rcnn = build(cfg)
    mask_rcnn.init_weights()
    finite(mask_rcnn, batch(cfg))
    mask_rcnn.neck.fpn_convs[0].conv.weight.data *= 1e30
    mask_rcnn.roi_head.mask_head.convs[0].conv.weight.data *= 1e30
    message = stopped(mask_rcnn, batch(cfg))
    assert 'loss_mask = ' in message.partition('(finite: ')[0]
    assert 'loss_rpn_cls[0] = ' in message.partition('(finite: ')[2]
    assert 'Images of this batch: photo_0.jpg, photo_1.jpg.' in message
    assert 'goes non-finite is roi_head.mask_head.convs.0.conv (Conv2d): its output is' in message
