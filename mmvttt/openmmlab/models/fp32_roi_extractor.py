"""mmdet's RoI extractor with boxes that keep their pixels under autocast.

mmdet casts the boxes to the features' type. bf16 has 8 bits: at x = 1000 a coordinate moves by up
to 2 pixels (in fp16 by up to ¼).
"""

from typing import Any

import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor

from ..registry import MODELS

_HALF = (torch.float16, torch.bfloat16)


@MODELS.register_module()
class FP32RoIExtractor(SingleRoIExtractor):
    """A `SingleRoIExtractor` that works in fp32 where its features are in bf16 or fp16."""

    def forward(self, feats: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
        """Maps of the pyramid `(B, C, h_i, w_i)`, boxes `(K, 5)` → `(K, C, h, w)`."""
        feats = tuple(f.float() if f.dtype in _HALF else f for f in feats)
        return super().forward(feats, *args, **kwargs)
