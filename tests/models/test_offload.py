"""Weights that are there only while the module that owns them is called, as in offloading."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import mmvttt


def _offload(model: nn.Module) -> None:
    """accelerate's sequential offload: each module's weights come with its call, and go again."""
    for module in model.modules():
        weights = {n: p for n, p in module._parameters.items() if p is not None}

        def leave(module: nn.Module, *_: Any) -> None:
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.to('meta'), False)

        leave(module)
        module.register_forward_pre_hook(lambda m, _, w=weights: m._parameters.update(w))
        module.register_forward_hook(leave)


def _linearized(name: str = 'vit_tiny_patch16_224', **options: Any) -> nn.Module:
    model = timm.create_model(name, depth=2, embed_dim=48, num_heads=3, img_size=64)
    mmvttt.linearize(model, **options)
    return model


@pytest.mark.parametrize(
    'build',
    [
        _linearized,
        lambda: _linearized(inner='MLP', epochs=2, step='dynamic', qk_affine=True),
        lambda: mmvttt.T5('tiny'),
        lambda: mmvttt.ViT3('tiny'),
        lambda: mmvttt.Vittt('tiny'),
    ],
)
def test_parameters_are_read_in_the_module_that_owns_them(build: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
        _offload(model)
        actual = model(image)
    pairs = (
        zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    )
    assert all(torch.equal(*pair) for pair in pairs)
