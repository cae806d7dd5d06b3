"""DINO and Mask2Former on our backbones: a reduced copy of each config takes a training step."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from torch import nn

from mmvttt.registry import MODELS

from .reduced import reduce_backbone
from .test_configs import det_batch
from .test_segmentors import batch as seg_batch

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
NAMES = ('dino_hvit3_t_1x', 'mask2former_hvit3_t_1x', 'mask2former_vittt_s_160k')


def reduced(name: str) -> tuple[Config, nn.Module]:
    """A config, and its model with a thin backbone, one layer a stack and few queries."""
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    init_default_scope(cfg.default_scope)
    model = cfg.model
    channels = reduce_backbone(model.backbone)
    if name.startswith('dino'):
        model.num_queries = 20
        model.neck.in_channels = channels[1:]
        model.encoder.num_layers = model.decoder.num_layers = 1
        model.dn_cfg.group_cfg.num_dn_queries = 10
        return cfg, MODELS.build(model)
    segments = 'decode_head' in model
    head = model.decode_head if segments else model.panoptic_head
    head.in_channels = channels
    head.num_queries = 10
    head.pixel_decoder.encoder.num_layers = 1
    head.transformer_decoder.num_layers = 2
    (head if segments else model).train_cfg.num_points = 64
    if segments:
        model.data_preprocessor.size = (64, 96)
    else:
        model.data_preprocessor.batch_augments[0].size = (64, 96)
    return cfg, MODELS.build(model)


@pytest.mark.parametrize('name', NAMES)
def test_reduced_model_steps(name: str) -> None:
    torch.manual_seed(0)
    cfg, model = reduced(name)
    model.init_weights()
    for parameter_name, parameter in model.named_parameters():
        # γ starts at 0, where nothing behind it can have a gradient.
        if parameter_name.endswith('gamma'):
            nn.init.constant_(parameter, 0.1)
    optim = build_optim_wrapper(model, cfg.optim_wrapper)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    make = seg_batch if 'decode_head' in cfg.model else det_batch
    batch = model.data_preprocessor(make(150) if make is seg_batch else make(), training=True)
    loss, _ = model.train().parse_losses(model(**batch, mode='loss'))
    loss.backward()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not silent
    optim.step()
    assert loss.isfinite()
    moved = sum(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert moved > 0.9 * len(before)
    model.eval()
    with torch.no_grad():
        batch = make(150) if make is seg_batch else make()
        assert len(model(**model.data_preprocessor(batch), mode='predict')) == 2


@pytest.mark.parametrize('name', NAMES)
def test_the_whole_model_builds(name: str) -> None:
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        assert any(p.numel() for p in MODELS.build(cfg.model).parameters())
