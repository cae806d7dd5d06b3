"""Parts of recipes: layer decay, schedules, averages of weights, mixed precision, FSDP, compile."""

from .amp import AmpOptimWrapper
from .fsdp import BlockFSDPStrategy, wrap_blocks
from .hooks.buffers import BroadcastBuffersHook
from .hooks.compile import CompileHook
from .hooks.ema import EMAHook
from .hooks.mesa import MESAHook
from .hooks.tf32 import TF32Hook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .schedules import WarmupCosineLR

__all__ = [
    'AmpOptimWrapper',
    'BlockFSDPStrategy',
    'BroadcastBuffersHook',
    'CompileHook',
    'EMAHook',
    'LayerDecayOptimWrapperConstructor',
    'MESAHook',
    'TF32Hook',
    'WarmupCosineLR',
    'wrap_blocks',
]
