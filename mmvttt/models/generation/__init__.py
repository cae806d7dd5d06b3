"""Diffusion transformers: DiT³ and DiT⁵, losses of DiT and rectified flow, sampling.

Needs the extra `gen` (diffusers), which `DiT3` imports when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from .losses import DDPMLoss, FlowLoss

if TYPE_CHECKING:
    from .dit3 import DiT3

__all__ = ['DDPMLoss', 'DiT3', 'FlowLoss']


def __getattr__(name: str) -> Any:
    if name == 'DiT3':
        from .dit3 import DiT3

        return DiT3
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
