"""What classification needs around the backbones; imports mmpretrain only when it is built."""

from typing import Any

from mmengine.model import BaseModel

from mmvttt.registry import MODELS


@MODELS.register_module(name='MESAClassifier')
def build_mesa_classifier(**config: Any) -> BaseModel:
    """A `mmvttt.models.classifiers.mesa.MESAClassifier`, which see for the arguments."""
    from .mesa import MESAClassifier

    return MESAClassifier(**config)


__all__ = ['build_mesa_classifier']
