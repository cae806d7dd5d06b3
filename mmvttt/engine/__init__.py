"""What trains a model: hooks, loops that resume exactly, layer decay, FSDP."""

from .exact_resume import (
    ExactBatchSampler,
    ExactEpochLoop,
    ExactIterLoop,
    SeededDataset,
    make_exact,
)
from .fsdp import BlockFSDPStrategy, wrap_blocks
from .hooks.anomaly import AnomalyError, AnomalyHook
from .hooks.checkpoint import CheckpointHook, Preempted
from .hooks.mesa import MESAHook
from .hooks.topology import TopologyHook
from .layer_decay import LayerDecayOptimWrapperConstructor

__all__ = [
    'AnomalyError',
    'AnomalyHook',
    'BlockFSDPStrategy',
    'CheckpointHook',
    'ExactBatchSampler',
    'ExactEpochLoop',
    'ExactIterLoop',
    'LayerDecayOptimWrapperConstructor',
    'MESAHook',
    'Preempted',
    'SeededDataset',
    'TopologyHook',
    'make_exact',
    'wrap_blocks',
]
