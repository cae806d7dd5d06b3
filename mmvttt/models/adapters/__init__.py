"""Adapters, which turn a plain backbone into a pyramid for dense prediction."""

from .vit_adapter import ViTAdapter

__all__ = ['ViTAdapter']
