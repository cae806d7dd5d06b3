"""Depth-wise 3×3 convolutions in Triton, shared by the kernels of several ops.

Everything is channels-last: a tile has pixels as rows and channels as columns, and its nine
neighbours are nine loads; the caches serve eight of them. Taps are numbered row by row.
"""

import triton
import triton.language as tl

from . import _launch

# Triton knows no starred tuples.
# ruff: noqa: RUF005


@triton.jit
def _pointers(base, pixels, stride, channels):
    return base + pixels.to(tl.int64)[:, None] * stride + channels[None, :]


@triton.jit
def load(base, pixels, last, stride, channels, D):
    inside = (pixels < last)[:, None] & (channels < D)[None, :]
    return tl.load(_pointers(base, pixels, stride, channels), mask=inside, other=0.0)


@triton.jit
def store(base, pixels, last, stride, channels, D, x):
    inside = (pixels < last)[:, None] & (channels < D)[None, :]
    pointers = _pointers(base, pixels, stride, channels)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_neighbours(base, pixels, last, stride, channels, D, h, w, ACC: tl.constexpr):
    """x[p + δ] for the nine taps δ, in ACC; zeros outside the map."""
    row, column = pixels // w, pixels % w
    taps = ()
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        inside = (pixels < last) & (row + down >= 0) & (row + down < h)
        inside &= (column + right >= 0) & (column + right < w)
        pointers = _pointers(base, pixels + (down * w + right), stride, channels)
        x = tl.load(pointers, mask=inside[:, None] & (channels < D)[None, :], other=0.0)
        taps = taps + (x.to(ACC),)
    return taps


@triton.jit
def load_taps(base, channels, stride_tap, stride_channel, D, ACC: tl.constexpr):
    """Loads the nine weights of every channel."""
    taps = ()
    for tap in tl.static_range(9):
        pointers = base + tap * stride_tap + channels * stride_channel
        taps = taps + (tl.load(pointers, mask=channels < D, other=0.0).to(ACC),)
    return taps


@triton.jit
def correlate(x, taps):
    """Σ_δ taps[δ]·x[p + δ]; x: nine tiles, taps: nine rows of channels."""
    total = x[0] * taps[0][None, :]
    for tap in tl.static_range(1, 9):
        total += x[tap] * taps[tap][None, :]
    return total


@triton.jit
def correlate_turned(x, taps):
    """`correlate` with the kernels turned by 180°: the taps in reverse."""
    total = x[0] * taps[8][None, :]
    for tap in tl.static_range(1, 9):
        total += x[tap] * taps[8 - tap][None, :]
    return total


@triton.jit
def zeros(PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr):
    sums = ()
    for _ in tl.static_range(9):
        sums = sums + (tl.zeros((PIXELS, CHANNELS), ACC),)
    return sums


@triton.jit
def add_products(sums, x, y):
    out = ()
    for tap in tl.static_range(9):
        out = out + (sums[tap] + x[tap] * y,)
    return out


# Pixels a block and warps: a thread holds eight channels of a pixel, 16 bytes in half precision,
# and their nine sums. tests/kernels/test_compile_kernels.py keeps registers and spills in check.
_PIXELS = 16
_WARPS = 4
_CHANNELS = 64


def config(dim: int) -> dict:
    """Options to compile the kernels for `dim` channels with; the same for all dtypes and GPUs."""
    channels = min(_CHANNELS, max(_launch.power_of_2(dim), 16))
    return {
        'PIXELS': _PIXELS * _CHANNELS // channels,
        'CHANNELS': channels,
        'num_warps': _WARPS,
    }


@_launch.plan
def share(shape: tuple[int, ...], h: int, w: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid for tokens `(B, h·w, D)`, and the arguments that all kernels take."""
    batch, pixels, dim = shape
    options = config(dim)
    blocks = _launch.cdiv(dim, options['CHANNELS'])
    splits, span = _launch.split(pixels, batch * blocks, options['PIXELS'])
    sizes = {'D': dim, 'h': h, 'w': w, 'span': span, 'splits': splits}
    return (batch * splits, blocks), {**sizes, **options}
