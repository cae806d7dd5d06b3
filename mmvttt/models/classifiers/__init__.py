"""Classifiers and metrics around the backbones; imports mmpretrain only when it is built."""

from typing import Any

from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel

from mmvttt.registry import METRICS, MODELS


@MODELS.register_module(name='MESAClassifier')
def build_mesa_classifier(**config: Any) -> BaseModel:
    """A `mmvttt.models.classifiers.mesa.MESAClassifier`, which see for the arguments."""
    from .mesa import MESAClassifier

    return MESAClassifier(**config)


@METRICS.register_module(name='TeacherAccuracy')
def build_teacher_accuracy(**config: Any) -> BaseMetric:
    """A `mmvttt.models.classifiers.mesa.TeacherAccuracy`, which see for the arguments."""
    from .mesa import TeacherAccuracy

    return TeacherAccuracy(**config)


__all__ = ['build_mesa_classifier', 'build_teacher_accuracy']
