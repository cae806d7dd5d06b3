"""mmdet's anchor generator with anchors that keep their pixels under autocast.

For predictions mmdet makes the anchors in the scores' type; the losses have fp32 anchors. bf16 has
8 bits: at 1333 × 800 anchors move by up to 7 pixels, and proposals with random deltas of standard
deviation 0.1 by up to 13 (in fp16 by up to ½ and 1.2).
"""

from typing import Any

import torch
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from torch import Tensor

from ..registry import TASK_UTILS


@TASK_UTILS.register_module()
class FP32AnchorGenerator(AnchorGenerator):
    """An `AnchorGenerator` that returns fp32 anchors where bf16 or fp16 is asked for."""

    def single_level_grid_priors(
        self,
        featmap_size: tuple[int, int],
        level_idx: int,
        dtype: torch.dtype = torch.float32,
        device: Any = 'cuda',
    ) -> Tensor:
        """A map of `h × w` places, A anchors at each → `(h * w * A, 4)`; used by `grid_priors`."""
        dtype = torch.promote_types(dtype, torch.float32)
        return super().single_level_grid_priors(featmap_size, level_idx, dtype, device)
