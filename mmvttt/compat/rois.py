"""Boxes keep their pixels under autocast: mmdet's RoI extractor casts them to the features' type.

bf16 counts 8 bits: at x = 1000 a coordinate moves by up to 2 pixels (in fp16 by up to ¼).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .patch import patch

EXTRACTOR = 'mmdet.models.roi_heads.roi_extractors.single_level_roi_extractor'
_HALF = (torch.float16, torch.bfloat16)


class _AfterImport:
    """A finder that calls back when one module has been imported, and then takes itself out."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and isinstance(spec.loader, Loader):
            run = spec.loader.exec_module

            def run_and_call_back(module: ModuleType) -> None:
                run(module)
                self.callback(module)

            spec.loader.exec_module = run_and_call_back
        return spec


def extract_in_fp32(module: ModuleType) -> None:
    """Wraps `SingleRoIExtractor.forward` of the module: features in half types become fp32."""
    extractor = module.SingleRoIExtractor
    original = extractor.forward

    @wraps(original)
    def forward(self: Any, feats: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
        feats = tuple(f.float() if f.dtype in _HALF else f for f in feats)
        return original(self, feats, *args, **kwargs)

    extractor.forward = forward


@patch('rois-amp', 'mmdet rounds the RoIs to bf16 or fp16 under autocast: boxes move by pixels')
def keep_rois() -> str | None:
    """Wraps mmdet's RoI extractor as soon as somebody imports it."""
    if find_spec('mmdet') is None:
        return 'mmdet is not installed'
    if EXTRACTOR in sys.modules:
        extract_in_fp32(sys.modules[EXTRACTOR])
    else:
        sys.meta_path.insert(0, _AfterImport(EXTRACTOR, extract_in_fp32))
    return None
