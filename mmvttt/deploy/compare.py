"""Compares an exported file's outputs with the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Runs a file: an image `(B, C, H, W)` → its outputs.
Runs = Callable[[Tensor], Sequence[Tensor]]
# Relative to an output's largest value: fp32 rounding, sums in another order.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Comparison of the file's outputs with the model's.

    Attributes:
        shape: Shape of the images, `(B, in_channels, H, W)`.
        error: Largest difference over the output's largest value; for boxes in pixels, for label
            maps as the share of pixels.
        text: A line for the screen.
        good: Whether the difference is small enough.
    """

    shape: tuple[int, ...]
    error: float
    text: str
    good: bool = True

    def __str__(self) -> str:
        return f'images {self.shape}: {self.text}'


def compare(network: nn.Module, run: Runs, image: Tensor) -> Comparison:
    """Compares all outputs of a module and of its file for one batch `(B, C, H, W)`."""
    with torch.no_grad():
        pairs = zip(as_sequence(network(image)), run(image), strict=True)
        # A NaN in any of them is the largest.
        error = float(torch.stack([_difference(a, b) for a, b in pairs]).max())
    text = f'differs by {error:.1e} of the largest output'
    return Comparison(tuple(image.shape), error, text, error < TOLERANCE)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """max|a − b| / max|a|."""
    return (a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(torch.float32).tiny)


def as_sequence(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """One output or several → a tuple."""
    return [outputs] if isinstance(outputs, Tensor) else outputs
