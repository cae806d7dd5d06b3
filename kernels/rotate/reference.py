"""Rotary positions in plain PyTorch: the executable specification."""

import math

import torch
from torch import Tensor

# Channels of a token that one product permutes.
PERMUTED = 32


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


def exported(x: Tensor, rotation: Tensor, backend: str) -> Tensor:
    """`primal` without interleaving pairs, which OpenVINO does element by element.

    A product with a permutation swaps the channels of each pair.
    """
    exact = torch.view_as_real(rotation)
    size = math.gcd(x.shape[-1], PERMUTED)
    swap = torch.eye(size, dtype=exact.dtype, device=x.device)
    swap = swap.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    real, imaginary = exact.unbind(-1)
    along = torch.stack([real, real], -1).flatten(-2)
    across = torch.stack([-imaginary, imaginary], -1).flatten(-2)
    x, dtype = x.to(exact.dtype), x.dtype
    swapped = (x.unflatten(-1, (-1, size)) @ swap).flatten(-2)
    return (x * along + swapped * across).to(dtype)
