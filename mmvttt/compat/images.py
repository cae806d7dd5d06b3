"""mmcv's image functions beside newer packages."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np

from .patch import patch, replace, when_imported


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
        when_imported('mmcv', _turn_back)
        return None
    return 'NumPy takes negative numbers'


def _turn_back(mmcv: ModuleType) -> None:
    original = mmcv.adjust_hue

    @wraps(original)
    def adjust_hue(img: np.ndarray, hue_factor: float, *args: Any, **kwargs: Any) -> np.ndarray:
        return original(img, _HueFactor(hue_factor), *args, **kwargs)

    for module in (mmcv, mmcv.image, mmcv.image.photometric):
        replace(module, 'adjust_hue', adjust_hue)
