"""Heads, classifiers and data preprocessors that extend a toolbox."""

from typing import Any

from mmvttt.on_demand import OnDemand

_NAMES = OnDemand(
    __name__,
    diffusion_model='DiffusionModel LatentPreprocessor',
    digit_quality='DigitQuality',
    distil='BlockwiseHook Distil',
)


def __getattr__(name: str) -> Any:
    return _NAMES.attribute(name)
