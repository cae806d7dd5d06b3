"""Rotary positions in plain PyTorch: the executable specification."""

import torch
from torch import Tensor


def primal(x: Tensor, rotation: Tensor) -> Tensor:
    """(a + i·b)·rotation of the pairs (a, b) of x, in the type of x; rounded once."""
    real, imaginary = torch.view_as_real(rotation).unbind(-1)
    a, b = x.to(real.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * real - b * imaginary, a * imaginary + b * real], -1)
    return turned.flatten(-2).to(x.dtype)


def gradient(do: Tensor, rotation: Tensor) -> Tensor:
    """Gradient of x: `do` turned back."""
    return primal(do, rotation.conj().resolve_conj())


forward, backward = torch.no_grad()(primal), torch.no_grad()(gradient)


def exported(*arguments) -> Tensor:
    """`primal` is in operators that exporters know."""
    return primal(*arguments[:-1])
