"""Norms of the keys before T⁵'s inner step, of which the mean over tokens matters (t5 Sec. 4.2)."""

import torch
from torch import Tensor

# By name: the dimension of the statistics (tokens 1, channels −1), whether the mean is subtracted,
# whether the root of the second moment divides.
_NORMS = {
    'rms': (-1, False, True),
    'layer': (-1, True, True),
    'instance': (1, True, True),
    'instance_center': (1, True, False),
    'instance_scale': (1, False, True),
}
KEY_NORMS = (None, *_NORMS)
# The authors' code has 1.0 over the tokens, where the paper writes ε.
_EPS = {1: 1.0, -1: 1e-6}


def normalize_keys(k: Tensor, kind: str | None) -> Tensor:
    """The keys of an image, without anything learned.

    - 'instance' (T⁵): over the N tokens of each channel, (k − mean) / √(var + 1), biased variance;
    - 'instance_center', 'instance_scale': its two halves, the subtraction of the mean alone, and
      the division by √(var + 1) alone;
    - 'layer', 'rms': over the C channels of each token, (k − mean) / √(var + 1e-6), and
      k / (√(mean of k²) + 1e-6).

    The centred ones take away a shift that all keys share, which softmax attention does not see
    and an inner step does. A single token becomes 0 by them. torch's instance norm refuses it.

    Args:
        k: `(B, N, C)`.
        kind: One of `KEY_NORMS`; None returns the keys as they are.

    Returns:
        `(B, N, C)` in the dtype of k; statistics and division are made in fp32 or more.
    """
    if kind is None:
        return k
    dim, center, divide = _NORMS[kind]
    x = k.to(torch.promote_types(k.dtype, torch.float32))
    if kind == 'rms':
        return (x / (x.square().mean(dim, keepdim=True).sqrt() + _EPS[dim])).to(k.dtype)
    var, mean = torch.var_mean(x, dim, correction=0, keepdim=True)
    if center:
        x = x - mean
    if divide:
        x = x * (var + _EPS[dim]).rsqrt()
    return x.to(k.dtype)
