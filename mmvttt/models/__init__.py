"""Layers, backbones and the adapter around them; mmengine imports this to find `mmvttt.X`."""

from . import adapters, backbones, classifiers, roi_extractors

__all__ = ['adapters', 'backbones', 'classifiers', 'roi_extractors']
