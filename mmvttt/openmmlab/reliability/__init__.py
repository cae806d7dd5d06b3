"""Protects a training: exact resume, whole checkpoints, signals, anomalies, ranks, data checks."""

from typing import Any

from mmvttt.on_demand import OnDemand

_NAMES = OnDemand(
    __name__,
    anomaly_hook='AnomalyError AnomalyHook',
    checkpoint_hook='CheckpointHook',
    exact_resume='ExactBatchSampler ExactEpochLoop ExactIterLoop make_exact',
    protect='Start add_protection protect_config protect_runner',
    seeded_dataset='SeededDataset',
    signals='Preempted',
)


def __getattr__(name: str) -> Any:
    return _NAMES.attribute(name)
