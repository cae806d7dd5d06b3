"""fp32 training with products in TF32, as by DiT's authors."""

from typing import Any

import torch
from mmengine.hooks import Hook

from ...registry import HOOKS


@HOOKS.register_module()
class TF32Hook(Hook):
    """Computes fp32 matrix products in TF32 during training, on GPUs that have it.

    The previous precision applies to evaluation and after the training.
    """

    priority = 'VERY_HIGH'

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Allows TF32 for matrices. For convolutions PyTorch does so by default."""
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Restores the previous precision."""
        torch.backends.cuda.matmul.allow_tf32 = self._before
