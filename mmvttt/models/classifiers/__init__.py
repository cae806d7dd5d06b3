"""Classifiers and metrics around the backbones; imports mmpretrain only when one is built."""

from mmvttt.registry import METRICS, MODELS, register_lazily

register_lazily(MODELS, f'{__name__}.mesa', 'MESAClassifier')
register_lazily(METRICS, f'{__name__}.mesa', 'TeacherAccuracy')
