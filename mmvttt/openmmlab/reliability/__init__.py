"""Protects a training: exact resume, whole checkpoints, signals, anomalies, ranks, data checks."""

from .anomaly_hook import AnomalyError, AnomalyHook
from .checkpoint_hook import CheckpointHook
from .exact_resume import ExactBatchSampler, ExactEpochLoop, ExactIterLoop, make_exact
from .protect import Start, add_protection, protect_config, protect_runner
from .seeded_dataset import SeededDataset
from .signals import Preempted

__all__ = [
    'AnomalyError',
    'AnomalyHook',
    'CheckpointHook',
    'ExactBatchSampler',
    'ExactEpochLoop',
    'ExactIterLoop',
    'Preempted',
    'SeededDataset',
    'Start',
    'add_protection',
    'make_exact',
    'protect_config',
    'protect_runner',
]
