"""Depth-wise convolutions over tokens: Conv1d on q, k and X, Conv2d on X (vision-ttt Sec. 4.3).

Tokens stay token-major, `(B, T, C)`. As an image this is the channels-last layout, so no
convolution here copies its input to another layout.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ttt_kernels import causal_conv

from .precision import at_least_fp32


def to_map(tokens: Tensor, hw: tuple[int, int]) -> Tensor:
    """Tokens `(B, h·w, C)` → map `(B, C, h, w)`.

    Transposing and then unflattening gives a single image the strides (C, 1, w·C, C), with which
    torch's BatchNorm on a CPU has a wrong gradient (docs/faq.md). A permutation has the strides of
    channels_last.
    """
    return tokens.unflatten(1, hw).permute(0, 3, 1, 2)


def map_size(x: Tensor) -> tuple[int, int]:
    """Height and width of an image or a map `(…, h, w)`, as numbers even when traced."""
    height, width = x.shape[-2:]
    # torch.jit.trace, which FLOP counters use, has tensors for sizes.
    return (int(height), int(width)) if torch.jit.is_tracing() else (height, width)


class DWConv2d(nn.Conv2d):
    """Depth-wise 3×3 convolution of a token map, zero padded to keep its size."""

    def __init__(self, channels: int, bias: bool = False) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels, bias=bias)

    # A convolution of tokens needs the size of their map.
    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """`(B, h·w, C)` tokens of an `(h, w)` map → `(B, h·w, C)`."""
        return super().forward(to_map(x, hw)).permute(0, 2, 3, 1).flatten(1, 2)


class CausalConv1d(nn.Module):
    """Depth-wise convolution along each scan, in which a token sees only its past.

    The past is at smaller token indices in a 'forward' scan and at larger ones in a 'backward'
    scan: reversing the tokens swaps the two (Algorithm 1, line 10).

    Args:
        channels: Channels C of one direction.
        kernel_size: Number of taps, of which the last one weighs the token itself.
        directions: 'forward' or 'backward', one for each scan.
    """

    def __init__(
        self, channels: int, kernel_size: int = 4, directions: tuple[str, ...] = ('forward',)
    ) -> None:
        super().__init__()
        self.directions = tuple(directions)
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(len(self.directions), channels, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises uniformly like `nn.Conv1d` at a fan-in of `kernel_size`."""
        bound = 1 / math.sqrt(self.kernel_size)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        *weights: Tensor,
        others: Sequence['CausalConv1d'] = (),
        function: Callable[..., Any] = causal_conv,
        **options: Any,
    ) -> Any:
        """`(B, T, R, C)` → `(B, T, R, C)`, scan r convolved in its own direction.

        With `weights` of further convolutions, or with `others` of the same directions, it returns
        a result for each: first of `weights`, then of this module, then of `others`. The tokens are
        read only once. Each weight is read in a call of its module, on which offloading relies.
        `function` gets tokens, weights, directions and `options`, and may do more than convolve.
        """
        weights = (*weights, at_least_fp32(self.weight))
        if others:
            return others[0](x, *weights, others=others[1:], function=function, **options)
        outputs = function(x, *weights, directions=self.directions, **options)
        return outputs if len(weights) > 1 else outputs[0]
