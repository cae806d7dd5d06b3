"""Mixed precision for configs, independent of the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from mmengine import optim
from torch import Tensor, nn

from mmvttt.errors import UsageError

from ..registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(optim.AmpOptimWrapper):
    """mmengine's `AmpOptimWrapper`, in bf16 if the device has it, else in fp16.

    In fp16 the inner gradients of test-time training underflow more easily; the authors of ViT³
    trained in fp16, when most devices had nothing else.

    Args:
        dtype: 'bfloat16' or 'float16'; default: by the device.
        loss_scale: As in mmengine; no effect in bf16.
        kwargs: Arguments of mmengine's `AmpOptimWrapper`.
    """

    def __init__(
        self, *, dtype: str | None = None, loss_scale: str | float | dict = 'dynamic', **kwargs: Any
    ) -> None:
        super().__init__(loss_scale=loss_scale, dtype=dtype or half_type(), **kwargs)


def half_type() -> str:
    """'bfloat16' if the device computes in it, else 'float16'."""
    gpu = torch.cuda.is_available()
    bf16 = not gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    return 'bfloat16' if bf16 else 'float16'


def autocast_backbone(model: nn.Module) -> None:
    """Runs a model's backbone in mixed precision, in place; its maps are fp32 again.

    Neck and heads stay in fp32: rounding hurts boxes and suppression, which are cheap. For
    evaluation only: linear layers keep rounded weights, which autocast would make at every call.

    Raises:
        UsageError: The model has no backbone.
    """
    backbone = getattr(model, 'backbone', None)
    if backbone is None:
        raise UsageError(f'--amp: {type(model).__name__} has no backbone; leave --amp out')
    dtype = getattr(torch, half_type())
    forward = backbone.forward
    for module in backbone.modules():
        if type(module) is nn.Linear:
            module.to(dtype)

    @functools.wraps(forward)
    def forward_in_half(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, dtype):
            maps = forward(x)
        return tuple(y.float() for y in maps)

    backbone.forward = forward_in_half
