"""Refuses norms that maps cannot go through."""

from typing import Any

import torch
from mmcv.cnn import build_norm_layer

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
