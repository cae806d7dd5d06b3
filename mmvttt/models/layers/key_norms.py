"""Norms of the keys before T⁵'s inner step (t5 Sec. 4.2).

A key norm is a function of keys `(B, N, C)` without parameters, which computes statistics and
divides in fp32 or more. Subtracting the mean over the tokens removes a shift that all keys share,
which softmax attention ignores but an inner step does not. A single token becomes 0, where torch's
instance norm raises an error.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .precision import at_least_fp32

KeyNorm = Callable[[Tensor], Tensor]

_CHANNEL_EPS = 1e-6
# The authors' code has 1.0 for the paper's ε.
_TOKEN_EPS = 1.0


def rms(k: Tensor) -> Tensor:
    """k / (√(mean of k²) + 1e-6) over the channels of each token: `(B, N, C)` → `(B, N, C)`."""
    x = at_least_fp32(k)
    return (x / (x.square().mean(-1, keepdim=True).sqrt() + _CHANNEL_EPS)).to(k.dtype)


def layer(k: Tensor) -> Tensor:
    """(k − mean) / √(var + 1e-6) over the channels of each token: `(B, N, C)` → `(B, N, C)`."""
    return _normalized(k, _CHANNEL_EPS)


def instance(k: Tensor) -> Tensor:
    """(k − mean) / √(var + 1) over the tokens of each channel, T⁵'s: `(B, N, C)` → `(B, N, C)`."""
    return _normalized(k.mT.contiguous(), _TOKEN_EPS).mT


def instance_center(k: Tensor) -> Tensor:
    """k − mean over the tokens of each channel: `(B, N, C)` → `(B, N, C)`."""
    x = at_least_fp32(k)
    return (x - x.mean(1, keepdim=True)).to(k.dtype)


def instance_scale(k: Tensor) -> Tensor:
    """k / √(var + 1) over the tokens of each channel: `(B, N, C)` → `(B, N, C)`."""
    x = at_least_fp32(k)
    # Not torch.var, which is slow over tokens.
    var = (x - x.mean(1, keepdim=True)).square().mean(1, keepdim=True)
    return (x * (var + _TOKEN_EPS).rsqrt()).to(k.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    """Layer normalization of rows in the dtype of `x`, also under autocast."""
    return torch.native_layer_norm(x, x.shape[-1:], None, None, eps)[0]


KEY_NORMS: dict[str, KeyNorm] = {
    norm.__name__: norm for norm in (rms, layer, instance, instance_center, instance_scale)
}
