"""ViT³'s gated inner model, f(x) = (xW1)⊙silu(xW2), with one full-batch training step, as an op."""

import math
from typing import Any

from torch import Tensor

from .. import _inputs
from .._op import Args, Op
from . import reference

_NAME = 'ttt_glu'


def ttt_glu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    scale: float = 1 / 3,
    damping: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Applies a gated linear unit to q after one gradient step on (k, v) (ViT³, Sec. 4).

    Every image and head starts from its (W1, W2), takes one step of 1.0 on the inner loss
    `−(scale/N)·Σ f(k)·v` over all N tokens, `f(x) = (xW1)⊙silu(xW2)`, and returns f(q) of the new
    weights. `damping` divides each column of a gradient by its norm plus 1: `g/(‖g‖₂ + 1)`.

    B images, N tokens, H heads, d channels a head.

    Args:
        q, k, v: `(B, N, H, d)`, N ≥ 1, one dtype of fp32, bf16, fp16, fp64; any strides, so that
            they may be views of one packed projection.
        w1, w2: `(H, d, d)` fp32 (fp64 where q is fp64), row vectors.
        scale: s of the inner loss. s/N is applied in fp32 after the sum over the tokens.
        damping: Whether to divide each gradient by its norm plus one, as published.
        backend: 'triton', 'numba' or 'reference' forces one (see `ttt_kernels`).

    Inner gradients and sums are kept in the dtype of the weights. Under autocast q, k and v go to
    the autocast dtype, the weights stay fp32.

    Returns:
        `(B, N, H, d)`, contiguous, dtype of q.
    """
    return OP(q, k, v, w1, w2, scale, damping, backend=backend)[0]


def _check(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, scale: float, damping: bool
) -> Args:
    _inputs.check_inner_step(_NAME, q, k, v, w1=w1, w2=w2)
    _inputs.check_damped_step(_NAME, scale, damping)
    return q, k, v, w1, w2, float(scale), damping


def _fake(args: Args, keep: bool) -> tuple[Tensor, Tensor]:
    q, w1 = args.q, args.w1
    batch, _, heads, dim = q.shape
    return q.new_empty(q.shape), w1.new_empty((batch, heads, dim, 2 * dim))


def _flops(products: int, q: Any, *_: Any) -> int:
    """FLOPs of products of every token of every head with a (d, d) matrix."""
    return 2 * math.prod(q) * products * q[-1]


OP = Op(
    _NAME,
    'Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, float scale, bool damping',
    reference,
    reference.primal,
    _check,
    _fake,
    # z1, z2, G1, G2, u1, u2. Backward: the reading u, dQ, dW′ (2 each); the step z, r, Kᵀdz (2
    # each) and dK (4).
    (lambda *args: _flops(6, *args), lambda *args: _flops(16, *args)),
    tokens=('q', 'k', 'v'),
    kept=('g',),
    typical=dict.fromkeys(('w1', 'w2'), (0, 0.15)),
)
