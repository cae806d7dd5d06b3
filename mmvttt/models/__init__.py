"""Layers, backbones and the adapter around them; mmengine imports this to find `mmvttt.X`."""

from . import adapters, backbones, classifiers, generation, inherit, roi_extractors
from .adapters import ViTAdapter
from .backbones import T5, HViT3, TimmViT, ViT3, Vittt

__all__ = [
    'T5',
    'HViT3',
    'TimmViT',
    'ViT3',
    'ViTAdapter',
    'Vittt',
    'adapters',
    'backbones',
    'classifiers',
    'generation',
    'inherit',
    'roi_extractors',
]
