"""The T⁵ configs: the freeze protocol, and rates that cannot be."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from torch import nn

from .reduced import batch_for, build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def classifier(name: str = 't5_t_in1k_30e', **backbone) -> tuple[Config, nn.Module]:
    cfg = reduce_model(Config.fromfile(CONFIGS / f'{name}.py'))
    cfg.model.backbone.update(backbone)
    return cfg, build(cfg)


def test_the_freeze_protocol_of_tab_1() -> None:
    cfg, model = classifier(only_new=True)
    cfg.optim_wrapper.paramwise_cfg.custom_keys = dict(head=dict(lr_mult=0))
    new = {f'backbone.{name}' for name in model.backbone.new_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optim = build_optim_wrapper(model, cfg.optim_wrapper)
    batch = model.train().data_preprocessor(batch_for(cfg, (64, 64)), training=True)
    optim.update_params(model.parse_losses(model(**batch, mode='loss'))[0])
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == new


def test_bad_rates_are_named() -> None:
    cfg, model = classifier()
    cfg.optim_wrapper.paramwise_cfg.new_lr_mult = 0
    with pytest.raises(ValueError, match='new_lr_mult=0'):
        build_optim_wrapper(model, cfg.optim_wrapper)
    softmax = dict(inner=dict(type='SoftmaxAttention'), locality=None)
    cfg, model = classifier(mixer=softmax)
    with pytest.raises(ValueError, match=r'new_lr_mult=.*names none'):
        build_optim_wrapper(model, cfg.optim_wrapper)
    cfg.optim_wrapper.paramwise_cfg.new_lr_mult = 1
    rates = {group['lr'] for group in build_optim_wrapper(model, cfg.optim_wrapper).param_groups}
    assert rates == {cfg.optim_wrapper.optimizer.lr}
