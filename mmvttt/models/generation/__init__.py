"""Diffusion transformers: DiT³, the losses of DiT and of rectified flow, sampling, measures.

Needs the extra `gen` (diffusers), which is imported when a model is built, not before.
"""

from typing import Any

from ...registry import MODELS
from .diffusion_model import DiffusionModel, LatentPreprocessor
from .digits import DigitQuality
from .losses import DDPMLoss, FlowLoss
from .measures import frechet_distance, precision_recall

__all__ = [
    'DDPMLoss',
    'DiffusionModel',
    'DigitQuality',
    'FlowLoss',
    'LatentPreprocessor',
    'build_dit3',
    'frechet_distance',
    'precision_recall',
]


@MODELS.register_module(name='DiT3')
def build_dit3(**options: Any) -> Any:
    """Builds a `mmvttt.models.generation.dit3.DiT3`, whose module imports diffusers."""
    from .dit3 import DiT3

    return DiT3(**options)
