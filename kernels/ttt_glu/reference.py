"""ViT³'s gated inner model in plain PyTorch: the executable specification of one full-batch step.

- `primal`: the definition, with the gradient of the inner loss by autograd.
- `forward`, `backward`: what the op runs without kernels. Explicit formulas with both weights side
  by side, `W = [W1 | W2]` `(H, d, 2d)`, so that every step is one product.

Vectors are rows, f(x) = (xW1)⊙silu(xW2). The inner loss is −(s/N)·Σ f(k)·v. Nothing is scaled by
s/N before the sum over the tokens: tokens of a large map would underflow in half precision.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inner_step import (
    damped,
    damped_backward,
    heads_first,
    over_heads,
    silu_derivatives,
    tokens_first,
)
from .._op import Args, Grads


def primal(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, scale: float, damping: bool = True
) -> Tensor:
    """The literal definition, `(B, N, H, d)`, differentiable by autograd."""

    def f(w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
        return (x @ w1) * F.silu(x @ w2)

    def loss(w1: Tensor, w2: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return -scale / q.shape[1] * (f(w1, w2, k) * v).sum()

    def read(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        grads = torch.func.grad(loss, argnums=(0, 1))(w1, w2, k, v)
        if damping:
            grads = [g / (g.norm(dim=0, keepdim=True) + 1) for g in grads]
        return f(w1 - grads[0], w2 - grads[1], q)

    return over_heads(read, q, k, v, w1, w2)


@torch.no_grad()
def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The step and the reading.

    Returns:
        O `(B, N, H, d)` contiguous, and the inner gradients before damping, [G1 | G2]
        `(B, H, d, 2d)` in the state's dtype.
    """
    q, k, v, w1, w2, scale, damping = args
    dtype, tokens, dim = q.dtype, q.shape[1], q.shape[-1]
    q, k, v = heads_first(q, k, v)
    w = torch.cat([w1, w2], dim=-1)
    z = k @ w
    z1, z2 = z[..., :dim], z[..., dim:]
    a, slope = silu_derivatives(z2, 1)
    # Not written into the halves of z: export needs functional operations.
    g = k.mT @ torch.cat([a * v, slope * v * z1], dim=-1) * (-scale / tokens)
    u1, u2 = (q @ (w - (damped(g, -2) if damping else g))).split(dim, dim=-1)
    return tokens_first(u1 * F.silu(u2), dtype), g


@torch.no_grad()
def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, w1 and w2, given dO and the g that `forward` returned.

    All gradients of the step are linear in `j = −κH`, with κ = s/N and H the gradient with respect
    to G: with r = K·j, dV = r1·a + r2·z1·a′, and so on.
    """
    (do,), (q, k, v, w1, w2, scale, damping), (g,) = grads, args, kept
    dtype, tokens, dim = q.dtype, q.shape[1], q.shape[-1]
    do, q, k, v = heads_first(do, q, k, v)
    w = torch.cat([w1, w2], dim=-1)

    # The reading: gradients of q and of the updated weights.
    stepped = w - (damped(g, -2) if damping else g)
    du = q @ stepped
    u1, u2 = du.split(dim, dim=-1)
    b, slope = silu_derivatives(u2, 1)
    torch.mul(do, u1, out=u2).mul_(slope)
    torch.mul(do, b, out=u1)
    dq = du @ stepped.mT
    dw = q.mT @ du
    j = (damped_backward(dw, g, -2) if damping else dw) * (scale / tokens)

    # The step: gradients of k, v and the initial weights.
    z, dz = k @ w, k @ j
    z1, z2 = z.split(dim, dim=-1)
    r1, r2 = dz.split(dim, dim=-1)
    a, slope, bend = silu_derivatives(z2, 2)
    mixed, steep = r2 * z1, v * slope
    dv = (r1 * a).addcmul_(mixed, slope)
    bent = (r1 * slope).addcmul_(mixed, bend)
    torch.mul(r2, steep, out=r1)
    torch.mul(v, bent, out=r2)
    torch.mul(z1, steep, out=z2)
    torch.mul(v, a, out=z1)
    dk = z @ j.mT + dz @ w.mT
    dw1, dw2 = (dw + k.mT @ dz).sum(0).split(dim, dim=-1)
    return (
        tokens_first(dq, dtype),
        tokens_first(dk, dtype),
        tokens_first(dv, dtype),
        # With one head of one channel these views are contiguous and share memory.
        dw1.clone(memory_format=torch.contiguous_format),
        dw2.clone(memory_format=torch.contiguous_format),
    )


def exported(*args: Any) -> tuple[Tensor, Tensor]:
    """`forward` in operators that exporters know. The last argument is the backend."""
    return forward(args[:-1])
