"""Data sets that mmvttt brings along. No toolbox is needed to import or build them."""

from .digits import make_digits

__all__ = ['make_digits']
