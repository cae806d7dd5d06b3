"""Precision of the parts of inner training that autocast must not round."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Converts half precision to fp32, in which inner models train, and leaves fp64 as it is."""
    return x.float() if x.dtype.itemsize < 4 else x


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Turns off autocast, which the meta device lacks, so that products keep their precision."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
