"""Heads, classifiers and data preprocessors that extend a toolbox. What needs none is imported."""

from .diffusion_model import DiffusionModel, LatentPreprocessor
from .digit_quality import DigitQuality
from .distil import BlockwiseHook, Distil

__all__ = ['BlockwiseHook', 'DiffusionModel', 'DigitQuality', 'Distil', 'LatentPreprocessor']
