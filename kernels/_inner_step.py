"""Functions that the references of the inner steps share: layouts, silu, the damping of ViT³."""

from collections.abc import Callable

import torch
from torch import Tensor

from ._inputs import state_dtype


def over_heads(
    read: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *weights: Tensor
) -> Tensor:
    """`read(q, k, v, *weights)` of one head `(N, d)`, for all images and heads `(B, N, H, d)`."""
    heads = (x.to(state_dtype(x.dtype)).transpose(1, 2) for x in (q, k, v))  # (B, H, N, d)
    images = (0, 0, 0, *[None] * len(weights))
    o = torch.func.vmap(torch.func.vmap(read), in_dims=images)(*heads, *weights)
    return o.transpose(1, 2).to(q.dtype).contiguous()


def heads_first(*tokens: Tensor) -> list[Tensor]:
    """`(B, N, H, d)` to `(B, H, N, d)`, in the state's dtype."""
    return [x.to(state_dtype(x.dtype)).transpose(1, 2) for x in tokens]


def tokens_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`(B, H, N, d)` to a contiguous `(B, N, H, d)` of `dtype`."""
    return x.transpose(1, 2).to(dtype).contiguous()


def silu_derivatives(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """silu(z) and its derivatives up to the first or the second."""
    sigma = torch.sigmoid(z)
    spread = 1 - sigma
    around = sigma * spread
    first = (z * sigma, torch.addcmul(sigma, z, around))
    return first if order == 1 else (*first, around * (2 + z * (spread - sigma)))


def damped(g: Tensor, dim: int) -> Tensor:
    """g/(‖g‖₂ + 1), norms along `dim`: steps of norm below 1, and nearly g for a small g."""
    return g / (torch.linalg.vector_norm(g, dim=dim, keepdim=True) + 1)


def damped_backward(grad: Tensor, g: Tensor, dim: int) -> Tensor:
    """Gradient with respect to g of a loss with gradient `grad` with respect to `damped(g)`.

    `(grad − e·Σ(e·grad) + e·Σ(e·grad)/(n + 1))/(n + 1)` with n = ‖g‖ and e = g/n. The parts across
    and along g are computed separately, because a large g nearly cancels the part along it. At
    n = 0, where the damping is the identity to first order, e is 0.
    """
    norm = torch.linalg.vector_norm(g, dim=dim, keepdim=True)
    unit = g / norm.masked_fill(norm == 0, 1)
    along = unit * (unit * grad).sum(dim, keepdim=True)
    return (grad - along + along / (norm + 1)) / (norm + 1)
