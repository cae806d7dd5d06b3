"""T⁵'s inner models in plain PyTorch: the executable specification of one full-batch step.

- `primal`: the definition, with the gradient of the inner loss by autograd.
- `forward`, `backward`: what the op runs without a GPU, by explicit formulas.

Vectors are rows. The two-layer model is f(x) = silu(xW1)·W2, the SwiGLU model (silu(xW1)⊙xW2)·W3.
In both, the first weight is inside silu and the last one is the output weight. The inner loss of N
tokens is −(s/N)·Σ f(k)·v ('dot') or (s/2N)·Σ‖f(k) − v‖² ('l2'). Nothing is scaled by s/N before the
sum over the tokens: tokens of a large map would underflow in half precision.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inner_step import heads_first, over_heads, silu_derivatives, tokens_first
from .._op import Args, Grads


def primal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    scale: float,
    loss: str = 'dot',
) -> Tensor:
    """The literal definition, `(B, N, H, d)`, differentiable by autograd."""
    weights = (w1, w2) if w3 is None else (w1, w2, w3)

    def f(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
        hidden = F.silu(x @ weights[0])
        for up in weights[1:-1]:
            hidden = hidden * (x @ up)
        return hidden @ weights[-1]

    def inner_loss(weights: tuple[Tensor, ...], k: Tensor, v: Tensor) -> Tensor:
        predicted = f(weights, k)
        total = -(predicted * v).sum() if loss == 'dot' else (predicted - v).square().sum() / 2
        return scale / q.shape[1] * total

    def read(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        grads = torch.func.grad(inner_loss)(weights, k, v)
        return f(tuple(w - g for w, g in zip(weights, grads, strict=True)), q)

    return over_heads(read, q, k, v, *weights)


def _error(hidden: Tensor, v: Tensor, w_out: Tensor, loss: str) -> Tensor:
    """The gradient of the inner loss with respect to f(k), over s/N."""
    return -v if loss == 'dot' else hidden @ w_out - v


@torch.no_grad()
def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The step and the reading.

    Returns:
        O `(B, N, H, d)` contiguous, and the inner gradients of the 2 or 3 weights, one after the
        other, `(B, H, 2|3, d, d)` in the state's dtype.
    """
    q, k, v, w1, w2, w3, scale, loss = args
    dtype, tokens = q.dtype, q.shape[1]
    q, k, v = heads_first(q, k, v)
    w_out = w2 if w3 is None else w3
    a, slope = silu_derivatives(k @ w1, 1)
    if w3 is None:
        e = _error(a, v, w_out, loss)
        grads = [k.mT @ (e @ w_out.mT * slope), a.mT @ e]
    else:
        z2 = k @ w2
        e = _error(a * z2, v, w_out, loss)
        d = e @ w_out.mT
        grads = [k.mT @ (d * z2 * slope), k.mT @ (d * a), (a * z2).mT @ e]
    g = torch.stack(grads, dim=2) * (scale / tokens)
    hidden = F.silu(q @ (w1 - g[:, :, 0]))
    if w3 is not None:
        hidden = hidden * (q @ (w2 - g[:, :, 1]))
    return tokens_first(hidden @ (w_out - g[:, :, -1]), dtype), g


@torch.no_grad()
def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, w1, w2 and w3, given dO and the g that `forward` returned.

    All gradients of the step are linear in `j = −κ·dW′`, κ = s/N, which is κ times the gradient
    with respect to G. Names with a d before them are gradients. D is the hidden layer's gradient in
    the inner loss. Without w3 the last result is empty.
    """
    (do,), (q, k, v, w1, w2, w3, scale, loss), (g,) = grads, args, kept
    dtype, tokens = q.dtype, q.shape[1]
    do, q, k, v = heads_first(do, q, k, v)
    gated = w3 is not None
    w_out = w3 if gated else w2

    # The reading: gradients of q and of the updated weights. Without w3 the second factor of the
    # hidden layer is 1.
    first, *between, last = (w - g[:, :, i] for i, w in enumerate([w1, w2, w3][: g.shape[2]]))
    h, slope = silu_derivatives(q @ first, 1)
    u2 = q @ between[0] if gated else 1
    dp = do @ last.mT
    du1 = dp * u2 * slope
    dq = du1 @ first.mT
    dw = [q.mT @ du1, (h * u2).mT @ do]
    if gated:
        du2 = dp * h
        dq += du2 @ between[0].mT
        dw.insert(1, q.mT @ du2)
    j_first, *j_between, j_last = (x * (-scale / tokens) for x in dw)

    # The step: gradients of k, v and the initial weights.
    a, slope, bend = silu_derivatives(k @ w1, 2)
    z2 = k @ w2 if gated else 1
    p = a * z2
    e = _error(p, v, w_out, loss)
    d = e @ w_out.mT
    r1 = k @ j_first
    dd = r1 * z2 * slope
    if gated:
        r2 = k @ j_between[0]
        dd += r2 * a
    de = p @ j_last + dd @ w_out
    dp = e @ j_last.mT
    dw[-1] += dd.mT @ e
    if loss == 'l2':
        dp += de @ w_out.mT
        dw[-1] += p.mT @ de
    dz1 = r1 * d * z2 * bend + dp * z2 * slope
    dk = (d * z2 * slope) @ j_first.mT
    if gated:
        dz1 += r2 * d * slope
        dz2 = r1 * d * slope + dp * a
        dk += (d * a) @ j_between[0].mT + dz2 @ w2.mT
        dw[1] += k.mT @ dz2
    dk += dz1 @ w1.mT
    dw[0] += k.mT @ dz1
    dw1, dw2, *dw3 = (x.sum(0) for x in dw)
    return (
        tokens_first(dq, dtype),
        tokens_first(dk, dtype),
        tokens_first(-de, dtype),
        dw1,
        dw2,
        dw3[0] if gated else w1.new_empty(0),
    )


def exported(*args: Any) -> tuple[Tensor, Tensor]:
    """`forward` in operators that exporters know. The last argument is the backend."""
    return forward(args[:-1])
