"""DINO and Mask2Former on our backbones, and mmdet's and mmseg's own on our operator, reduced."""

import copy
from pathlib import Path

import pytest
import torch
from mmcv.ops import MultiScaleDeformableAttention, multi_scale_deform_attn
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from torch import nn

from mmvttt.analysis.flops import count_cost
from mmvttt.analysis.models import DenseForward
from mmvttt.registry import MODELS

from .reduced import reduce_backbone
from .test_configs import det_batch
from .test_segmentors import batch as seg_batch

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
NAMES = ('dino_hvit3_t_1x', 'mask2former_hvit3_t_1x', 'mask2former_vittt_s_160k')


def reduced(name: str) -> tuple[Config, nn.Module]:
    """A config of ours, and its model with a thin backbone, one layer a stack and few queries."""
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    return cfg, build_reduced(cfg, reduce_backbone(cfg.model.backbone))


def build_reduced(cfg: Config, channels: list[int]) -> nn.Module:
    """The model of a config on maps of `channels`, one layer a stack and few queries."""
    init_default_scope(cfg.default_scope)
    model = cfg.model
    if 'encoder' in model:
        model.num_queries = 20
        model.neck.in_channels = channels[1:]
        model.encoder.num_layers = model.decoder.num_layers = 1
        if 'dn_cfg' in model:
            model.dn_cfg.group_cfg.num_dn_queries = 10
        return MODELS.build(model)
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
    return MODELS.build(model)


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


OWN = {
    'Deformable DETR': 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'DINO': 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py',
    'Mask2Former': 'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
    'Mask2Former of mmseg': 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py',
}


def reduced_own(path: str) -> tuple[Config, nn.Module]:
    """A config of a toolbox with a thin ResNet-18, one layer a stack and few queries."""
    cfg = get_config(path)
    thin = dict(type='ResNet', depth=18, base_channels=8, stem_channels=8)
    cfg.model.backbone.update(**thin, frozen_stages=-1, init_cfg=None)
    return cfg, build_reduced(cfg, [8, 16, 32, 64])


def of_step(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    """The loss of a training step, and the gradient of every parameter."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss, _ = model.parse_losses(model(**batch, mode='loss'))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {'loss': loss.detach(), **grads}


@pytest.mark.parametrize('name', OWN)
def test_models_of_the_toolboxes_step_on_our_operator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmcv runs its grid sampling on a CPU, and on a GPU the operator that we bring."""
    torch.manual_seed(0)
    cfg, model = reduced_own(OWN[name])
    model.init_weights()
    attentions = [m for m in model.modules() if isinstance(m, MultiScaleDeformableAttention)]
    assert attentions
    for attention in attentions:
        # They begin at 0, where queries do not move the places.
        nn.init.normal_(attention.sampling_offsets.weight, std=0.05)
        nn.init.normal_(attention.attention_weights.weight, std=0.05)
    make = seg_batch if 'decode_head' in cfg.model else det_batch
    batch = make(150) if make is seg_batch else make()
    batch = model.train().data_preprocessor(batch, training=True)
    expected = of_step(model, batch)
    calls = []

    def operator(value, shapes, places, weights):
        starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
        calls.append(tuple(places.shape))
        return MultiScaleDeformableAttnFunction.apply(value, shapes, starts, places, weights, 64)

    monkeypatch.setattr(multi_scale_deform_attn, 'multi_scale_deformable_attn_pytorch', operator)
    found = of_step(model, copy.deepcopy(batch))
    assert len(calls) == len(attentions)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # fp32, its sums in another order; relative to the tensor.
        assert (found[key] - value).norm() <= 1e-3 * value.norm() + 1e-7, key
    optim = build_optim_wrapper(model, cfg.optim_wrapper)
    before = attentions[0].sampling_offsets.weight.detach().clone()
    optim.step()
    assert not torch.equal(before, attentions[0].sampling_offsets.weight)


@pytest.mark.parametrize('name', NAMES)
def test_flops_of_heads_with_transformers(name: str) -> None:
    """They read sizes from tensors, which the meta device has not: it is the CPU that counts."""
    _, model = reduced(name)
    cost = count_cost(DenseForward(model), (64, 96))
    heads = [n for n in cost.macs if n in ('encoder', 'bbox_head', 'panoptic_head', 'decode_head')]
    assert heads
    assert all(cost.macs[n] > 0 for n in (*heads, 'backbone'))
    assert cost.total_params == sum(p.numel() for p in model.parameters())
    assert cost.uncounted == []


@pytest.mark.parametrize('name', NAMES)
def test_the_whole_model_builds(name: str) -> None:
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        assert any(p.numel() for p in MODELS.build(cfg.model).parameters())
