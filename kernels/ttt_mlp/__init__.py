"""T⁵'s two-layer and SwiGLU inner models, with one full-batch training step, as a registered op."""

import math
from typing import Any

from torch import Tensor

from .. import _inputs
from .._op import Args, Op
from . import reference

_NAME = 'ttt_mlp'
LOSSES = ('dot', 'l2')


def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    *,
    loss: str = 'dot',
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """Applies a small MLP to q after one gradient step on (k, v) (T⁵, Sec. 4).

    With two weights it is `f(x) = silu(xW1)·W2`, with three the SwiGLU `f(x) = (silu(xW1)⊙xW2)·W3`.
    Every image and head starts from its weights, takes one step of 1.0 on the inner loss over all
    N tokens, and returns f(q) of the new weights. The loss is `−(scale/N)·Σ f(k)·v`, or
    `(scale/2N)·Σ‖f(k) − v‖²`.

    B images, N tokens, H heads, d channels a head.

    Args:
        q, k, v: `(B, N, H, d)`, N ≥ 1, one dtype of fp32, bf16, fp16, fp64; any strides, so that
            they may be views of one packed projection.
        w1, w2, w3: `(H, d, d)` fp32 (fp64 where q is fp64), row vectors; without w3 the two-layer
            model.
        loss: 'dot' (T⁵ for images) or 'l2' (DiT⁵).
        scale: s of the inner loss, d^−½ in T⁵. s/N is applied in fp32 after the sum over the
            tokens.
        backend: 'triton', 'numba' or 'reference' forces one (see `ttt_kernels`).

    Inner gradients and sums are kept in the dtype of the weights. Under autocast q, k and v go to
    the autocast dtype, the weights stay fp32.

    Returns:
        `(B, N, H, d)`, contiguous, dtype of q.
    """
    return OP(q, k, v, w1, w2, w3, scale, loss, backend=backend)[0]


def _check(*args: Any) -> Args:
    q, k, v, w1, w2, w3, scale, loss = args
    weights = {'w1': w1, 'w2': w2} | ({} if w3 is None else {'w3': w3})
    _inputs.check_inner_step(_NAME, q, k, v, **weights)
    if loss not in LOSSES:
        raise ValueError(f"{_NAME}: loss={loss!r}: choose one of 'dot', 'l2'.")
    _inputs.check_number(_NAME, 'scale', scale)
    return q, k, v, w1, w2, w3, float(scale), loss


def _fake(args: Args, keep: bool) -> tuple[Tensor, Tensor]:
    q, w1, w3 = args.q, args.w1, args.w3
    batch, _, heads, dim = q.shape
    weights = 2 if w3 is None else 3
    return q.new_empty(q.shape), w1.new_empty((batch, heads, weights, dim, dim))


# Products of a token with a (d, d) matrix, forward and backward, without and with w3.
_PRODUCTS = {'dot': {False: (6, 15), True: (9, 23)}, 'l2': {False: (7, 18), True: (10, 26)}}


def _flops(way: int, q: Any, k: Any, v: Any, w1: Any, w2: Any, w3: Any, _: float, loss: str) -> int:
    return 2 * math.prod(q) * _PRODUCTS[loss][w3 is not None][way] * q[-1]


OP = Op(
    _NAME,
    'Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor? w3, float scale, str loss',
    reference,
    reference.primal,
    _check,
    _fake,
    (lambda *args: _flops(0, *args), lambda *args: _flops(1, *args)),
    tokens=('q', 'k', 'v'),
    kept=('g',),
    typical=dict.fromkeys(('w1', 'w2', 'w3'), (0, 0.15)),
)
