"""Reduced configs of all backbones, models of configs without OpenMMLab, random weights."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmvttt.models import ViTAdapter
from mmvttt.models.adapters.interaction import Injector
from mmvttt.models.backbones import BACKBONES
from mmvttt.models.build import build_part, split_config

MODELS = {**BACKBONES, 'ViTAdapter': ViTAdapter}
PLAIN = dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 2, 1, 1), num_heads=(1, 2, 3, 4))
VITTT = dict(type='mmvttt.Vittt', arch=PLAIN, img_size=64)
# Rotary positions, a class token and four registers.
DINO = dict(
    model='vit_small_patch16_dinov3', model_options=dict(embed_dim=64, depth=4, num_heads=2)
)
ADAPTER = dict(conv_inplane=16, norm_layer=dict(type='BN'))
# A reduced config of each model of the library.
CASES: dict[str, dict] = {
    'Vittt': VITTT,
    'ViT3': dict(type='mmvttt.ViT3', arch=PLAIN),
    'T5': dict(type='mmvttt.T5', arch=PLAIN, img_size=64),
    'TimmViT': dict(type='mmvttt.TimmViT', linearize=dict(), **DINO),
    'HViT3': dict(type='mmvttt.HViT3', arch=STAGES),
    'ViTAdapter': dict(type='mmvttt.ViTAdapter', backbone=VITTT, **ADAPTER),
}
OWN = ('Vittt', 'ViT3', 'T5', 'HViT3')
# With these options a model is the transformer that it comes from.
SOFTMAX = dict(inner=dict(type='SoftmaxAttention'), key_norm=None, locality=None)


def build(config: Mapping[str, Any]) -> nn.Module:
    kind, options = split_config('model', copy.deepcopy(config), MODELS)
    return injecting(build_part('model', kind, **options))


def injecting(model: nn.Module) -> nn.Module:
    """The model with γ = 0.5 in its injectors: nothing of them would be seen at their 0."""
    for injector in model.modules():
        if isinstance(injector, Injector):
            nn.init.constant_(injector.gamma, 0.5)
    return model


def build_case(name: str, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build(CASES[name] | options)


def shaken(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """The model with no weight at 0 or 1, whatever its initialisation, for evaluation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    # mmpretrain's eval() returns nothing.
    model.eval()
    return model
