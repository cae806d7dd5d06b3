"""Backbones: each exists once and serves classification, detection and segmentation."""

from typing import TYPE_CHECKING, Any

from mmvttt.on_demand import OnDemand

if TYPE_CHECKING:
    from .base import PlainBackbone
    from .h_vit3 import HViT3
    from .t5 import T5
    from .timm_vit import TimmViT
    from .vit3 import ViT3
    from .vittt import Vittt

__all__ = ['T5', 'HViT3', 'PlainBackbone', 'TimmViT', 'ViT3', 'Vittt']
BACKBONES = OnDemand(
    __name__, h_vit3='HViT3', t5='T5', timm_vit='TimmViT', vit3='ViT3', vittt='Vittt'
)
_BODIES = OnDemand(__name__, base='PlainBackbone')


def __getattr__(name: str) -> Any:
    return BACKBONES[name] if name in BACKBONES else _BODIES.attribute(name)
