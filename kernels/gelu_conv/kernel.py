"""Triton kernels of GELU, residual depth-wise 3×3 and GELU: one pass forward, two backward.

`_walk` goes down a strip of the map. Of every row it loads three tiles, a pixel apart, and adds
them to the sums of three rows of outputs: a GELU is made three times, not nine. Backward it gives
the gradient of the sum, and `_stencil` takes it from there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._stencil import config, load, load_taps, residual_backward, store
from .._triton import gelu


@triton.jit
def _row(x, row, columns, stride, channels, D, h, w, ACC: tl.constexpr):
    """gelu(x) of a row's columns; zeros outside of the map."""
    inside = (columns >= 0) & (columns < w) & (row >= 0) & (row < h)
    pointers = x + (row * w + columns).to(tl.int64)[:, None] * stride + channels[None, :]
    z = tl.load(pointers, mask=inside[:, None] & (channels < D)[None, :], other=0.0)
    a, _ = gelu(z.to(ACC))
    return a


@triton.jit
def _weigh(left, centre, right, taps, first: tl.constexpr):
    """Three taps from `first` on."""
    total = left * taps[first][None, :] + centre * taps[first + 1][None, :]
    return total + right * taps[first + 2][None, :]


@triton.jit(do_not_specialize=['h', 'w', 'span', 'splits'])
def _walk(
    x,  # (B, h·w, D), any strides but the last
    weight,  # (D, 3, 3)
    bias,  # (D,)
    do,  # (B, h·w, D), any strides but the last
    out,  # (B, h·w, D)
    x_strides,
    do_strides,
    D,
    h,
    w,
    span,
    splits,
    BIAS: tl.constexpr,
    BACKWARD: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The output, or the gradient of what the second GELU takes, of a strip's `span` rows."""
    ACC: tl.constexpr = weight.dtype.element_ty
    strips = tl.cdiv(w, PIXELS)
    image = (tl.program_id(0) // (strips * splits)).to(tl.int64)
    strip, part = tl.program_id(0) // splits % strips, tl.program_id(0) % splits
    columns = strip * PIXELS + tl.arange(0, PIXELS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = part * span
    last = tl.minimum(first + span, h)
    x += image * x_strides[0]
    do += image * do_strides[0]
    out += image * h * w * D
    taps = load_taps(weight, channels, 1, 9, D, ACC)
    shift = tl.zeros((CHANNELS,), ACC)
    if BIAS:
        shift += tl.load(bias + channels, mask=channels < D, other=0.0)
    # Sums of the row before and of this one, without the rows from here on.
    above = tl.zeros((PIXELS, CHANNELS), ACC)
    here = tl.zeros((PIXELS, CHANNELS), ACC)
    for row in tl.range(first - 1, last + 1):
        left = _row(x, row, columns - 1, x_strides[1], channels, D, h, w, ACC)
        centre = _row(x, row, columns, x_strides[1], channels, D, h, w, ACC)
        right = _row(x, row, columns + 1, x_strides[1], channels, D, h, w, ACC)
        a, slope = gelu(above + _weigh(left, centre, right, taps, 6) + shift[None, :])
        above = here + centre + _weigh(left, centre, right, taps, 3)
        here = _weigh(left, centre, right, taps, 0)
        # The row before is whole, and stored unless it is another program's.
        pixels = (row - 1) * w + columns
        end = tl.where(row > first, row, first - 2) * w
        if BACKWARD:
            a = load(do, pixels, end, do_strides[1], channels, D).to(ACC) * slope
        store(out, pixels, end, D, channels, D, a)


# -------------------------------------------------------------------------------------------- host

unsupported_reason = _launch.unsupported_reason


def _launch_walk(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int, do: Tensor | None = None
) -> Tensor:
    batch, _, dim = x.shape
    options = config(dim)
    blocks = _launch.cdiv(dim, options['CHANNELS'])
    strips = batch * _launch.cdiv(w, options['PIXELS'])
    splits, span = _launch.split(h, strips * blocks, 1)
    out = x.new_empty(x.shape)
    weight = weight.contiguous()
    with torch.cuda.device_of(x):
        _walk[(strips * splits, blocks)](
            **_launch.with_strides(x=x, do=x if do is None else do),
            weight=weight,
            bias=weight if bias is None else bias.contiguous(),
            out=out,
            D=dim,
            h=h,
            w=w,
            span=span,
            splits=splits,
            BIAS=bias is not None,
            BACKWARD=do is not None,
            **options,
        )
    return out


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int) -> Tensor:
    """The output, arguments as the reference's."""
    return _launch_walk(x, weight, bias, h, w)


def backward(
    do: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, as the reference's."""
    dz = _launch_walk(x, weight, bias, h, w, do)
    return residual_backward(dz, x, weight, h, w, gelu=True)
