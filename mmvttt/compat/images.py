"""mmcv's image functions beside newer packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np

from .patch import on_undo, patch, when_imported


class _HueFactor(float):
    """A hue factor that mmcv multiplies by 255 and hands to `np.uint8`: modulo 256, as hues are."""

    def __mul__(self, steps: float) -> int:  # type: ignore[override]
        return int(float(self) * steps) % 256


@patch('negative-hues', 'mmcv makes a uint8 of a negative number, which NumPy 2 refuses')
def turn_hues_back() -> str | None:
    """Lets `mmcv.adjust_hue` and mmpretrain's ColorJitter turn hues both ways."""
    try:
        np.uint8(-1)
    except OverflowError:
        # mmcv's packages take the function from here; they may be there already, or halfway.
        when_imported('mmcv.image.photometric', _turn_back)
        return None
    return 'NumPy takes negative numbers'


def _turn_back(photometric: ModuleType) -> None:
    original = photometric.adjust_hue

    @wraps(original)
    def adjust_hue(img: np.ndarray, hue_factor: float, *args: Any, **kwargs: Any) -> np.ndarray:
        return original(img, _HueFactor(hue_factor), *args, **kwargs)

    def swap(old: Callable[..., Any], new: Callable[..., Any]) -> None:
        for name in ('mmcv', 'mmcv.image', 'mmcv.image.photometric'):
            if vars(sys.modules[name]).get('adjust_hue') is old:
                sys.modules[name].adjust_hue = new  # type: ignore[attr-defined]

    swap(original, adjust_hue)
    on_undo(swap, adjust_hue, original)
