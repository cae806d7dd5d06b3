"""Norms of the keys before T⁵'s inner step; the mean over tokens matters (t5 Sec. 4.2).

A key norm is a function of keys `(B, N, C)` without parameters; statistics and division are in fp32
or more. Subtracting the mean over the tokens removes a shift that all keys share, which softmax
attention ignores but an inner step does not. A single token becomes 0; torch's instance norm
refuses it.
"""

from collections.abc import Callable

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
    x, mean, var = _moments(k, -1)
    return ((x - mean) * (var + _CHANNEL_EPS).rsqrt()).to(k.dtype)


def instance(k: Tensor) -> Tensor:
    """(k − mean) / √(var + 1) over the tokens of each channel, T⁵'s: `(B, N, C)` → `(B, N, C)`."""
    x, mean, var = _moments(k, 1)
    return ((x - mean) * (var + _TOKEN_EPS).rsqrt()).to(k.dtype)


def instance_center(k: Tensor) -> Tensor:
    """k − mean over the tokens of each channel: `(B, N, C)` → `(B, N, C)`."""
    x, mean, _ = _moments(k, 1)
    return (x - mean).to(k.dtype)


def instance_scale(k: Tensor) -> Tensor:
    """k / √(var + 1) over the tokens of each channel: `(B, N, C)` → `(B, N, C)`."""
    x, _, var = _moments(k, 1)
    return (x * (var + _TOKEN_EPS).rsqrt()).to(k.dtype)


def _moments(k: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The keys in fp32 or more, their mean and biased variance.

    Not torch.var_mean, which is slow over tokens, and which inductor does not fuse.
    """
    x = at_least_fp32(k)
    mean = x.mean(dim, keepdim=True)
    return x, mean, (x - mean).square().mean(dim, keepdim=True)


KEY_NORMS: dict[str, KeyNorm] = {
    norm.__name__: norm for norm in (rms, layer, instance, instance_center, instance_scale)
}
