"""What the references of ViT³'s inner steps share: their dtype and the damping g/(‖g‖ + 1)."""

import torch
from torch import Tensor


def damped(g: Tensor, dim: int) -> Tensor:
    """g/(‖g‖₂ + 1), norms along `dim`: a step of at most 1, and the plain one for small g."""
    return g / (torch.linalg.vector_norm(g, dim=dim, keepdim=True) + 1)


def damped_backward(grad: Tensor, g: Tensor, dim: int) -> Tensor:
    """Gradient with respect to g of a loss with gradient `grad` with respect to `damped(g)`.

    `grad/(n + 1) − g·Σ(g·grad)/(n(n + 1)²)`, n = ‖g‖; at n = 0, where the damping is the identity
    to first order, the second term is 0.
    """
    norm = torch.linalg.vector_norm(g, dim=dim, keepdim=True)
    unit = g / norm.masked_fill(norm == 0, 1)
    along = (unit * grad).sum(dim, keepdim=True)
    return grad / (norm + 1) - g * along / (norm + 1).square()
