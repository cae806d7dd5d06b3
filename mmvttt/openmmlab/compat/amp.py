"""Mixed precision without a GPU: AmpOptimWrapper with bf16 autocast on the CPU."""

from __future__ import annotations

from functools import partial

import torch
from mmengine.optim.optimizer import amp_optimizer_wrapper as amp

from .patch import replace


def autocast_on_cpu() -> str | None:
    """Lets AmpOptimWrapper be built without a GPU; mmengine's autocast does bf16 there."""
    if amp.is_cuda_available() or amp.is_npu_available() or amp.is_mlu_available():
        return 'there is a GPU'
    # Changes only this module's view of the machine: its assertion, and its loss scaler's device.
    replace(amp, 'is_cuda_available', lambda: True)
    replace(amp, 'GradScaler', partial(torch.amp.GradScaler, 'cpu'))
    return None
