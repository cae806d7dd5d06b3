"""Protects a training: exact resume, whole checkpoints, signals, anomalies, ranks, data checks."""

from .anomaly_hook import AnomalyError, AnomalyHook
from .checkpoint_hook import CheckpointHook
from .exact_resume import (
    ExactBatchSampler,
    ExactEpochLoop,
    ExactIterLoop,
    SeededDataset,
    make_exact,
)
from .signals import Preempted
from .topology_hook import TopologyHook

__all__ = [
    'AnomalyError',
    'AnomalyHook',
    'CheckpointHook',
    'ExactBatchSampler',
    'ExactEpochLoop',
    'ExactIterLoop',
    'Preempted',
    'SeededDataset',
    'TopologyHook',
    'make_exact',
]
