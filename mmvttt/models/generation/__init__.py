"""Diffusion transformers: DiT³ and DiT⁵, losses of DiT and rectified flow, sampling.

Needs the extra `gen` (diffusers), which `DiT3` imports when it is asked for.
"""

from typing import TYPE_CHECKING

from mmvttt.on_demand import OnDemand

if TYPE_CHECKING:
    from .dit3 import DiT3
    from .losses import DDPMLoss, FlowLoss

__all__ = ['DDPMLoss', 'DiT3', 'FlowLoss']
__getattr__ = OnDemand(__name__, dit3='DiT3', losses='DDPMLoss FlowLoss').attribute
