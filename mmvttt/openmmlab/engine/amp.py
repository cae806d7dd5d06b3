"""Mixed precision for configs, independent of the device."""

from __future__ import annotations

from typing import Any

from mmengine import optim

from mmvttt.deploy.prepare import half_type

from ..registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(optim.AmpOptimWrapper):
    """mmengine's `AmpOptimWrapper`, in bf16 if the device has it, else in fp16.

    In fp16 the inner gradients of test-time training underflow more easily. The authors of ViT³
    trained in fp16, when most devices had nothing else.

    Args:
        dtype: 'bfloat16' or 'float16', by default by the device.
        loss_scale: As in mmengine. It has no effect in bf16.
        kwargs: Arguments of mmengine's `AmpOptimWrapper`.
    """

    def __init__(
        self, *, dtype: str | None = None, loss_scale: str | float | dict = 'dynamic', **kwargs: Any
    ) -> None:
        super().__init__(loss_scale=loss_scale, dtype=dtype or half_type(), **kwargs)
