"""Models of the library from configs, without OpenMMLab, and models with random weights."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmvttt.models import ViTAdapter
from mmvttt.models.backbones import BACKBONES
from mmvttt.models.build import build_part, split_config

MODELS = {**BACKBONES, 'ViTAdapter': ViTAdapter}
# With these options a model is the transformer that it comes from.
SOFTMAX = dict(inner=dict(type='SoftmaxAttention'), key_norm=None, locality=None)


def build(config: Mapping[str, Any]) -> nn.Module:
    kind, options = split_config('model', copy.deepcopy(config), MODELS)
    return build_part('model', kind, **options)


def shaken(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """The model with no weight at 0 or 1, whatever its initialisation, for evaluation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    # mmpretrain's eval() returns nothing.
    model.eval()
    return model
