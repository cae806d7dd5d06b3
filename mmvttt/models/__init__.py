"""The library: layers, backbones, the adapter around them, linearizing, generation."""

from .adapters import ViTAdapter
from .backbones import T5, HViT3, TimmViT, ViT3, Vittt

__all__ = ['T5', 'HViT3', 'TimmViT', 'ViT3', 'ViTAdapter', 'Vittt']
