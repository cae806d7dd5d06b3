"""What the references of ViT³'s inner steps share: their dtype and the damping g/(‖g‖ + 1)."""

import torch
from torch import Tensor


def damped(g: Tensor, dim: int) -> Tensor:
    """g/(‖g‖₂ + 1), norms along `dim`: a step of at most 1, and the plain one for small g."""
    return g / (torch.linalg.vector_norm(g, dim=dim, keepdim=True) + 1)


def damped_backward(grad: Tensor, g: Tensor, dim: int) -> Tensor:
    """Gradient with respect to g of a loss with gradient `grad` with respect to `damped(g)`.

    `(grad − e·Σ(e·grad) + e·Σ(e·grad)/(n + 1))/(n + 1)`, n = ‖g‖ and e = g/n: what is across g, and
    what is along it, apart, because of the latter a large g leaves next to nothing. At n = 0, where
    the damping is the identity to first order, e is 0.
    """
    norm = torch.linalg.vector_norm(g, dim=dim, keepdim=True)
    unit = g / norm.masked_fill(norm == 0, 1)
    along = unit * (unit * grad).sum(dim, keepdim=True)
    return (grad - along + along / (norm + 1)) / (norm + 1)
