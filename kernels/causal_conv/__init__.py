"""Depth-wise causal convolutions along scans (vision-ttt Sec. 4.3), as a registered op."""

import math
from typing import Any

from torch import Tensor

from .. import _inputs
from .._op import Args, Op
from . import reference

_NAME = 'causal_conv'


def causal_conv(
    x: Tensor,
    *weights: Tensor,
    directions: tuple[str, ...] = ('forward', 'backward'),
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Filters every scan along its tokens, each from itself and its past (Algorithm 1, l. 10).

    With K taps, `y[t] = Σ_j weight[j]·x[t − (K − 1 − j)]` in a 'forward' scan, and
    `x[t + (K − 1 − j)]` in a 'backward' one, whose past lies at larger t. A scan is zero before its
    first token. Two weights on the same tokens (q and k of a shared projection) read them once.

    B images, T tokens, R = len(directions) scans, C channels.

    Args:
        x: `(B, T, R, C)`, fp32, bf16, fp16 or fp64; any strides, so that it may be a view of a
            packed projection.
        weights: one or two `(R, C, K)`, fp32 (fp64 where x is fp64).
        directions: per scan, 'forward' or 'backward'. The output of token t stands at t in both.
        backend: 'triton', 'numba' or 'reference' forces one (see `ttt_kernels`).

    Sums are kept in the dtype of the weights. Under autocast x goes to the autocast dtype, the
    weights stay fp32.

    Returns:
        One `(B, T, R, C)` for each weight, contiguous, dtype of x.
    """
    if not 1 <= len(weights) <= 2:
        raise ValueError(f'{_NAME}: give one or two weights, got {len(weights)}')
    return OP(x, *(*weights, None)[:2], directions, backend=backend)[: len(weights)]


def _definition(x: Tensor, weight: Tensor, other: Tensor | None, ways: str) -> tuple[Tensor, ...]:
    weights = (weight,) if other is None else (weight, other)
    return tuple(reference.primal(x, w, ways) for w in weights)


def _check(x: Tensor, weight: Tensor, other: Tensor | None, directions: Any) -> Args:
    sizes = _inputs.sizes_of(_NAME, 'x', x, '(B, T, R, C)', 'TC')
    ways = _inputs.direction_letters(_NAME, directions, 'x', x)
    if weight.dim() != 3 or weight.shape[2] == 0:
        raise ValueError(
            f'{_NAME}: weight must have shape (R, C, K), K ≥ 1, got {tuple(weight.shape)}'
        )
    weights = {'weight': weight} | ({} if other is None else {'other': other})
    sizes['K'] = weight.shape[2]
    _inputs.check_parameters(_NAME, x.dtype, sizes, '(R, C, K)', **weights)
    return x, weight, other, ways


def _fake(args: Args, keep: bool) -> tuple[Tensor, Tensor]:
    x, _, other, _ = args
    return x.new_empty(x.shape), x.new_empty(0 if other is None else x.shape)


def _flops(x: Any, weight: Any, other: Any, *_: Any) -> int:
    """2K per token, channel and weight, as for any convolution."""
    return 2 * math.prod(x) * weight[-1] * (1 if other is None else 2)


OP = Op(
    _NAME,
    'Tensor x, Tensor weight, Tensor? other, str directions',
    reference,
    _definition,
    _check,
    _fake,
    # Backward: the gradients of x and of the weights.
    (_flops, lambda *args: 2 * _flops(*args)),
    tokens=('x',),
    results=2,
    typical=dict.fromkeys(('weight', 'other'), (0, 0.5)),
)
