"""RoI extractors of detectors; imports mmdet only when one is built."""

from mmvttt.registry import MODELS, register_lazily

register_lazily(MODELS, f'{__name__}.fp32', 'FP32RoIExtractor')
