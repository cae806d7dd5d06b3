"""RoI extractors of detectors; imports mmdet only when it is built."""

from typing import Any

from torch import nn

from mmvttt.registry import MODELS


@MODELS.register_module(name='FP32RoIExtractor')
def build_fp32_roi_extractor(**config: Any) -> nn.Module:
    """A `mmvttt.models.roi_extractors.fp32.FP32RoIExtractor`, which see for the arguments."""
    from .fp32 import FP32RoIExtractor

    return FP32RoIExtractor(**config)


__all__ = ['build_fp32_roi_extractor']
