"""Backbones: each exists once and serves classification, detection and segmentation."""

from .base import PlainBackbone
from .h_vit3 import HViT3
from .mixer_backbone import MixerBackbone
from .t5 import T5
from .timm_vit import TimmViT
from .vit3 import ViT3
from .vittt import DESIGN_ROUTE, Vittt

BACKBONES = {kind.__name__: kind for kind in (T5, HViT3, TimmViT, ViT3, Vittt)}

__all__ = [
    'BACKBONES',
    'DESIGN_ROUTE',
    'T5',
    'HViT3',
    'MixerBackbone',
    'PlainBackbone',
    'TimmViT',
    'ViT3',
    'Vittt',
]
