"""Backbones: each exists once and serves classification, detection and segmentation."""

from .base import PlainBackbone
from .h_vit3 import HViT3
from .vit3 import ViT3
from .vittt import DESIGN_ROUTE, Vittt

__all__ = ['DESIGN_ROUTE', 'HViT3', 'PlainBackbone', 'ViT3', 'Vittt']
