"""Data sets of mmvttt. No toolbox is needed to import or build them."""

from .digit_images import DigitImages, TinyDigits
from .digits import make_digits
from .latents import CachedLatents, cache_latents

__all__ = ['CachedLatents', 'DigitImages', 'TinyDigits', 'cache_latents', 'make_digits']
