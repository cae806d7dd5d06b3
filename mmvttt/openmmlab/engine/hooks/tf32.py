"""fp32 training whose products are computed in TF32, as the authors of DiT train."""

from typing import Any

import torch
from mmengine.hooks import Hook

from ...registry import HOOKS


@HOOKS.register_module()
class TF32Hook(Hook):
    """Computes products of fp32 matrices in TF32 while a model trains, on GPUs that have it.

    Evaluation and what follows the training have the precision of before.
    """

    priority = 'VERY_HIGH'

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Allows TF32 for matrices; for convolutions PyTorch does by default."""
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Puts the precision of before back."""
        torch.backends.cuda.matmul.allow_tf32 = self._before
