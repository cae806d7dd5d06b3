"""Precision of the parts of inner training that autocast must not round."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """The inner models train in fp32, whatever the activations are; fp64 stays fp64."""
    return x.float() if x.dtype.itemsize < 4 else x


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Turns autocast off, so that products keep their precision; the meta device has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
