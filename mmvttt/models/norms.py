"""Refuses norms that maps cannot go through, and maps of which a norm learns nothing."""

from typing import Any

import torch
from mmcv.cnn import build_norm_layer
from mmengine.dist import is_distributed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..arguments import check_config


def check_norm_cfg(norm_cfg: Any, channels: int) -> None:
    """A config of a norm of maps `(B, channels, h, w)`, tried on the smallest of them."""
    check_config('norm_cfg', norm_cfg, "dict(type='BN')")
    try:
        norm = build_norm_layer(norm_cfg, channels)[1]
        norm.eval()(torch.zeros(1, channels, 2, 2))
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f'norm_cfg={norm_cfg!r} is no norm of maps with {channels} channels: choose '
            "dict(type='BN'), dict(type='SyncBN') or dict(type='GN', num_groups=…). "
            f'{type(error).__name__} {error}'
        ) from error


def check_statistics(model: nn.Module, x: Tensor, stride: int) -> None:
    """A BatchNorm in training needs more than one cell `(B, …, H, W)` of the map at `stride`."""
    cells = x.shape[0] * -(-x.shape[2] // stride) * -(-x.shape[3] // stride)
    # The synchronised one has the cells of the other processes too.
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d) if is_distributed() else _BatchNorm
    if cells == 1 and any(isinstance(m, kinds) and m.training for m in model.modules()):
        raise ValueError(
            f'A single image of {x.shape[2]}×{x.shape[3]} pixels is one cell at stride {stride}, '
            'of which BatchNorm has no statistics to train with: give more or larger images, or '
            "another norm_cfg, such as dict(type='GN', num_groups=32)."
        )
