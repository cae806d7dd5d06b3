"""What trains a model: hooks, loops that resume exactly, schedules, layer decay, FSDP."""

from .amp import AmpOptimWrapper
from .exact_resume import (
    ExactBatchSampler,
    ExactEpochLoop,
    ExactIterLoop,
    SeededDataset,
    make_exact,
)
from .fsdp import BlockFSDPStrategy, wrap_blocks
from .hooks.anomaly import AnomalyError, AnomalyHook
from .hooks.checkpoint import CheckpointHook
from .hooks.compile import CompileHook, compile_blocks
from .hooks.ema import EMAHook
from .hooks.inner_loop import InnerLoopHook
from .hooks.mesa import MESAHook
from .hooks.topology import TopologyHook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .schedules import WarmupCosineLR
from .signals import Preempted

__all__ = [
    'AmpOptimWrapper',
    'AnomalyError',
    'AnomalyHook',
    'BlockFSDPStrategy',
    'CheckpointHook',
    'CompileHook',
    'EMAHook',
    'ExactBatchSampler',
    'ExactEpochLoop',
    'ExactIterLoop',
    'InnerLoopHook',
    'LayerDecayOptimWrapperConstructor',
    'MESAHook',
    'Preempted',
    'SeededDataset',
    'TopologyHook',
    'WarmupCosineLR',
    'compile_blocks',
    'make_exact',
    'wrap_blocks',
]
