"""The library: layers, backbones, the adapter around them, linearizing, generation."""

from typing import TYPE_CHECKING

from ..on_demand import OnDemand

if TYPE_CHECKING:
    from .adapters import ViTAdapter
    from .backbones import T5, HViT3, TimmViT, ViT3, Vittt

__all__ = ['T5', 'HViT3', 'TimmViT', 'ViT3', 'ViTAdapter', 'Vittt']
__getattr__ = OnDemand(
    __name__, adapters='ViTAdapter', backbones='T5 HViT3 TimmViT ViT3 Vittt'
).attribute
