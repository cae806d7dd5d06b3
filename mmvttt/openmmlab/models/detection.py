"""mmdet's parts that keep their pixels under autocast, and its test-time augmentation of masks."""

from typing import Any

import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.structures import DetDataSample
from torch import Tensor

from ..registry import MODELS, TASK_UTILS

_HALF = (torch.float16, torch.bfloat16)


@TASK_UTILS.register_module()
class FP32AnchorGenerator(AnchorGenerator):
    """An `AnchorGenerator` that returns fp32 anchors where bf16 or fp16 is asked for.

    For predictions mmdet makes the anchors in the scores' type. The losses have fp32 anchors. bf16
    has 8 bits: at 1333 × 800 anchors move by up to 7 pixels, and proposals with random deltas of
    standard deviation 0.1 by up to 13 (in fp16 by up to ½ and 1.2).
    """

    def single_level_grid_priors(
        self,
        featmap_size: tuple[int, int],
        level_idx: int,
        dtype: torch.dtype = torch.float32,
        device: Any = 'cuda',
    ) -> Tensor:
        """A map of `h × w` places, A anchors at each → `(h * w * A, 4)`, for `grid_priors`."""
        dtype = torch.promote_types(dtype, torch.float32)
        return super().single_level_grid_priors(featmap_size, level_idx, dtype, device)


@MODELS.register_module()
class FP32RoIExtractor(SingleRoIExtractor):
    """A `SingleRoIExtractor` that works in fp32 where its features are in bf16 or fp16.

    mmdet casts the boxes to the features' type. bf16 has 8 bits: at x = 1000 a coordinate moves by
    up to 2 pixels (in fp16 by up to ¼).
    """

    def forward(self, feats: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
        """Maps of the pyramid `(B, C, h_i, w_i)`, boxes `(K, 5)` → `(K, C, h, w)`."""
        feats = tuple(f.float() if f.dtype in _HALF else f for f in feats)
        return super().forward(feats, *args, **kwargs)


@MODELS.register_module()
class BoxTTAModel(DetTTAModel):
    """A `DetTTAModel` that leaves out masks, which mmdet cannot merge, instead of failing."""

    def _merge_single_sample(self, data_samples: list[DetDataSample]) -> DetDataSample:
        for sample in data_samples:
            sample.pred_instances.pop('masks', None)
        return super()._merge_single_sample(data_samples)
