"""Heads, classifiers and data preprocessors that extend a toolbox; what needs none is imported."""

from .diffusion_model import DiffusionModel, LatentPreprocessor
from .digit_quality import DigitQuality

__all__ = ['DiffusionModel', 'DigitQuality', 'LatentPreprocessor']
