"""Parts of recipes: layer decay, schedules, averages of weights, mixed precision, FSDP, compile."""

from typing import Any

from mmvttt.on_demand import OnDemand

_NAMES = OnDemand(
    __name__,
    amp='AmpOptimWrapper',
    fsdp='BlockFSDPStrategy wrap_blocks',
    layer_decay='LayerDecayOptimWrapperConstructor',
    schedules='WarmupCosineLR',
    **{
        'hooks.buffers': 'BroadcastBuffersHook',
        'hooks.compile': 'CompileHook',
        'hooks.ema': 'EMAHook',
        'hooks.mesa': 'MESAHook',
        'hooks.tf32': 'TF32Hook',
    },
)


def __getattr__(name: str) -> Any:
    return _NAMES.attribute(name)
