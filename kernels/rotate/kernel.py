"""Triton kernel of rotary positions: one pass, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._stencil import load, store


@triton.jit(do_not_specialize=['N'])
def _rotate(
    x,  # (B, N, D), any strides but the last
    rotation,  # (N, D): cosine and sine of every pair
    out,  # (B, N, D)
    x_strides,
    D,
    N,
    BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile of tokens and channels, turned, or turned back."""
    blocks = tl.cdiv(N, TOKENS)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    PAIRS: tl.constexpr = CHANNELS // 2
    turn = load(rotation, tokens, N, D, channels, D)
    real, imaginary = tl.split(tl.reshape(turn, (TOKENS, PAIRS, 2)))
    if BACKWARD:
        imaginary = -imaginary
    pairs = load(x + image * x_strides[0], tokens, N, x_strides[1], channels, D)
    a, b = tl.split(tl.reshape(pairs.to(turn.dtype), (TOKENS, PAIRS, 2)))
    turned = tl.join(a * real - b * imaginary, a * imaginary + b * real)
    turned = tl.reshape(turned, (TOKENS, CHANNELS))
    store(out + image * N * D, tokens, N, D, channels, D, turned)


# -------------------------------------------------------------------------------------------- host


def config(dim: int) -> dict[str, int]:
    """Options to compile the kernel for `dim` channels with; the same for all dtypes and GPUs."""
    channels = min(max(_launch.power_of_2(dim), 16), 128)
    return {'TOKENS': 2048 // channels, 'CHANNELS': channels, 'num_warps': 4}


unsupported_reason = _launch.unsupported_reason


def forward(x: Tensor, rotation: Tensor, backward: bool = False) -> Tensor:
    """The output, or with `backward` the gradient of x, given the gradient of the output."""
    batch, tokens, dim = x.shape
    options = config(dim)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (
        batch * _launch.cdiv(tokens, options['TOKENS']),
        _launch.cdiv(dim, options['CHANNELS']),
    )
    with torch.cuda.device_of(x):
        _rotate[grid](
            **_launch.with_strides(x=x),
            rotation=torch.view_as_real(rotation.contiguous()),
            out=out,
            D=dim,
            N=tokens,
            BACKWARD=backward,
            **options,
        )
    return out


def backward(do: Tensor, rotation: Tensor) -> Tensor:
    """Gradient of x: `do` turned back."""
    return forward(do, rotation, backward=True)
