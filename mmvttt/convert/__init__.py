"""Checkpoints of other code to ours: ViT³, H-ViT³, T⁵, DiT³, DiT⁵ and DiT."""

from ..checkpoints.conversion import Conversion
from .files import convert_checkpoint

__all__ = ['Conversion', 'convert_checkpoint']
