"""Triton kernels of ViT³'s depth-wise 3×3 inner model: two passes forward, two backward.

Forward: `_step` sums the inner gradients G over k and v. `_read` takes the damped step when it
    loads the kernels, and filters q. Backward: `_read_backward` goes over dO and q and sums the
    gradients of the updated kernels. `_step_backward` converts them to `j = −κH` when it loads
    them, and filters k and v. If few images would leave a GPU idle, several programs share a sum
    (`_launch`).

Everything is channels-last: a tile has pixels as rows and channels as columns, and its nine
neighbours are nine loads. The caches serve eight of them. Taps are numbered row by row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._op import Args, Grads
from .._triton import channel_pointers, load, share_of, store

# Triton knows no starred tuples.
# ruff: noqa: RUF005

# ------------------------------------------------------------------------------------------- tiles


@triton.jit
def _share_of(splits, span, pixels, CHANNELS: tl.constexpr):
    """The image and the pixels of a program, as `share_of` has them, and its channels."""
    image, first, last = share_of(splits, span, pixels)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return image.to(tl.int64), first, last, channels


@triton.jit
def load_neighbours(base, pixels, last, stride, channels, D, h, w, ACC: tl.constexpr):
    """x[p + δ] for the nine taps δ, in ACC, and zeros outside the map."""
    row, column = pixels // w, pixels % w
    taps = ()
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        inside = (pixels < last) & (row + down >= 0) & (row + down < h)
        inside &= (column + right >= 0) & (column + right < w)
        pointers = channel_pointers(base, pixels + (down * w + right), stride, channels)
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
def correlate(x, taps, TURNED: tl.constexpr = False):
    """Σ_δ taps[δ]·x[p + δ], or with kernels TURNED by 180°, whose taps are in reverse.

    x: nine tiles, taps: nine rows of channels.
    """
    total = x[0] * taps[8 if TURNED else 0][None, :]
    for tap in tl.static_range(1, 9):
        total += x[tap] * taps[8 - tap if TURNED else tap][None, :]
    return total


@triton.jit
def _zeros(PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr):
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


@triton.jit
def _dot(x, y):
    """Σ over the taps of x[δ]·y[δ]."""
    total = x[0] * y[0]
    for tap in tl.static_range(1, 9):
        total += x[tap] * y[tap]
    return total


@triton.jit
def _stepped(w3, g, channels, D, DAMPING: tl.constexpr, ACC: tl.constexpr):
    """w′ = w − G/(‖G‖ + 1), with the norm over the taps, of w3 `(D, 9)` and g `(9, D)`."""
    w = load_taps(w3, channels, 1, 9, D, ACC)
    g = load_taps(g, channels, D, 1, D, ACC)
    divisor = tl.sqrt(_dot(g, g)) + 1 if DAMPING else tl.full(channels.shape, 1, ACC)
    out = ()
    for tap in tl.static_range(9):
        out = out + (w[tap] - g[tap] / divisor,)
    return out


@triton.jit
def _step_gradient(g, dw, channels, D, factor, DAMPING: tl.constexpr, ACC: tl.constexpr):
    """j = −κH: the gradient of w′ through the damping, times κ = `factor`."""
    g = load_taps(g, channels, D, 1, D, ACC)
    dw = load_taps(dw, channels, D, 1, D, ACC)
    out = ()
    if DAMPING:
        norm = tl.sqrt(_dot(g, g))
        along = _dot(g, dw) / tl.where(norm == 0, 1, norm) / (norm + 1)
        for tap in tl.static_range(9):
            out = out + ((dw[tap] - g[tap] * along) / (norm + 1) * factor,)
    else:
        for tap in tl.static_range(9):
            out = out + (dw[tap] * factor,)
    return out


# ----------------------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=['h', 'w', 'span', 'splits', 'divisor'])
def _step(
    k,  # (B, h·w, D), any strides but the last
    v,
    g,  # (B, splits, 9, D)
    k_strides,
    v_strides,
    factor,
    D,
    h,
    w,
    span,
    splits,
    divisor,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums k[p + δ]·v[p]·factor/divisor over a span of pixels, for every tap δ."""
    ACC: tl.constexpr = g.dtype.element_ty
    image, first, last, channels = _share_of(splits, span, h * w, CHANNELS)
    k += image * k_strides[0]
    v += image * v_strides[0]
    sums = _zeros(PIXELS, CHANNELS, ACC)
    for n in tl.range(first, last, PIXELS):
        pixels = n + tl.arange(0, PIXELS)
        e = load(v, pixels, last, v_strides[1], channels, D).to(ACC)
        sums = add_products(
            sums, load_neighbours(k, pixels, last, k_strides[1], channels, D, h, w, ACC), e
        )
    g += tl.program_id(0).to(tl.int64) * 9 * D + channels
    for tap in tl.static_range(9):
        total = tl.sum(sums[tap], axis=0) * factor / divisor
        tl.store(g + tap * D, total, mask=channels < D)


@triton.jit(do_not_specialize=['h', 'w', 'span', 'splits'])
def _read(
    q,  # (B, h·w, D), any strides but the last
    w3,  # (D, 3, 3)
    g,  # (B, 9, D)
    o,  # (B, h·w, D)
    q_strides,
    D,
    h,
    w,
    span,
    splits,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DAMPING: tl.constexpr,
):
    """O[p] = Σ_δ w′[δ]·q[p + δ] of a span of pixels."""
    ACC: tl.constexpr = g.dtype.element_ty
    image, first, last, channels = _share_of(splits, span, h * w, CHANNELS)
    q += image * q_strides[0]
    o += image * h * w * D
    taps = _stepped(w3, g + image * 9 * D, channels, D, DAMPING, ACC)
    for n in tl.range(first, last, PIXELS):
        pixels = n + tl.arange(0, PIXELS)
        near = load_neighbours(q, pixels, last, q_strides[1], channels, D, h, w, ACC)
        store(o, pixels, last, D, channels, D, correlate(near, taps))


# ---------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=['h', 'w', 'span', 'splits'])
def _read_backward(
    do,  # (B, h·w, D), any strides but the last
    q,
    w3,  # (D, 3, 3)
    g,  # (B, 9, D)
    dq,  # (B, h·w, D)
    dw,  # (B, splits, 9, D)
    do_strides,
    q_strides,
    D,
    h,
    w,
    span,
    splits,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DAMPING: tl.constexpr,
):
    """dQ[p] = Σ_δ w′[δ]·dO[p − δ] and dw′[δ] = Σ_p q[p]·dO[p − δ], from the same nine loads."""
    ACC: tl.constexpr = dw.dtype.element_ty
    image, first, last, channels = _share_of(splits, span, h * w, CHANNELS)
    do += image * do_strides[0]
    q += image * q_strides[0]
    dq += image * h * w * D
    taps = _stepped(w3, g + image * 9 * D, channels, D, DAMPING, ACC)
    sums = _zeros(PIXELS, CHANNELS, ACC)
    for n in tl.range(first, last, PIXELS):
        pixels = n + tl.arange(0, PIXELS)
        near = load_neighbours(do, pixels, last, do_strides[1], channels, D, h, w, ACC)
        q_tile = load(q, pixels, last, q_strides[1], channels, D).to(ACC)
        store(dq, pixels, last, D, channels, D, correlate(near, taps, TURNED=True))
        sums = add_products(sums, near, q_tile)
    dw += tl.program_id(0).to(tl.int64) * 9 * D + channels
    for tap in tl.static_range(9):
        # `near` was numbered by −δ.
        tl.store(dw + (8 - tap) * D, tl.sum(sums[tap], axis=0), mask=channels < D)


@triton.jit(do_not_specialize=['h', 'w', 'span', 'splits'])
def _step_backward(
    k,  # (B, h·w, D), any strides but the last
    v,
    g,  # (B, 9, D)
    dw,  # (B, 9, D)
    dk,  # (B, h·w, D)
    dv,
    k_strides,
    v_strides,
    factor,
    D,
    h,
    w,
    span,
    splits,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DAMPING: tl.constexpr,
):
    """dV[p] = Σ_δ j[δ]·k[p + δ] and dK[p] = Σ_δ j[δ]·v[p − δ] of a span of pixels."""
    ACC: tl.constexpr = dw.dtype.element_ty
    image, first, last, channels = _share_of(splits, span, h * w, CHANNELS)
    k += image * k_strides[0]
    v += image * v_strides[0]
    dk += image * h * w * D
    dv += image * h * w * D
    start = image * 9 * D
    # In the interpreter `tl.cast` would round it to fp32 first.
    kappa = tl.full((), factor, ACC) / (h * w)
    j = _step_gradient(g + start, dw + start, channels, D, kappa, DAMPING, ACC)
    for n in tl.range(first, last, PIXELS):
        pixels = n + tl.arange(0, PIXELS)
        # All loads come first: after a store that might alias them they would wait.
        keys = load_neighbours(k, pixels, last, k_strides[1], channels, D, h, w, ACC)
        values = load_neighbours(v, pixels, last, v_strides[1], channels, D, h, w, ACC)
        store(dv, pixels, last, D, channels, D, correlate(keys, j))
        store(dk, pixels, last, D, channels, D, correlate(values, j, TURNED=True))


# -------------------------------------------------------------------------------------------- host


# Pixels a block and warps: a thread holds eight channels of a pixel, 16 bytes in half precision,
# and their nine sums. tests/kernels/test_compile_kernels.py keeps registers and spills in check.
_PIXELS = 16
_WARPS = 4
_CHANNELS = 64


def config(dim: int) -> dict:
    """Compile options of the kernels for `dim` channels, the same for all dtypes and GPUs."""
    channels = min(_CHANNELS, max(_launch.power_of_2(dim), 16))
    return {
        'PIXELS': _PIXELS * _CHANNELS // channels,
        'CHANNELS': channels,
        'num_warps': _WARPS,
    }


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments, or None where they can."""
    return _launch.unsupported_reason(args.q)


@_launch.plan
def _planned(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    h: int,
    w: int,
    damping: bool,
    *strides: tuple[int, ...],
) -> tuple[int, _launch.Launch, _launch.Launch]:
    """Splits of each sum, and launches over k and v, and over q.

    The backward pass's if the strides of dO come first.
    """
    *do, q, k, v = strides
    batch, pixels, dim = shape
    options = config(dim)
    blocks = _launch.cdiv(dim, options['CHANNELS'])
    splits, span = _launch.split(pixels, batch * blocks, options['PIXELS'])
    grid = batch * splits, blocks
    sizes = {'D': dim, 'h': h, 'w': w, 'span': span, 'splits': splits, **options}
    step, read = (_step_backward, _read_backward) if do else (_step, _read)
    queries = {'do': do[0], 'q': q} if do else {'q': q}
    damped = {**sizes, 'DAMPING': damping}
    of_keys, of_queries = _launch.token_strides(k=k, v=v), _launch.token_strides(**queries)
    return (
        splits,
        _launch.Launch(step, grid, **(damped if do else sizes), **of_keys),
        _launch.Launch(read, grid, **damped, **of_queries),
    )


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """O `(B, h·w, d)` and G before damping `(B, 9, d)`, as in the reference."""
    q, k, v, w3, h, w, scale, damping = args
    batch, pixels, dim = q.shape
    (q, k, v), strides = _launch.dense(q, k, v)
    splits, step, read = _planned(q.shape, q.dtype, q.device, h, w, damping, *strides)
    g = w3.new_empty((batch, splits, 9, dim))
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    factor, divisor = (-scale, pixels) if splits == 1 else (1.0, 1)
    with _launch.on(q):
        step(k=k, v=v, g=g, factor=factor, divisor=divisor)
        if splits > 1:
            g = _launch.add_up(g, -scale, pixels)
        read(q=q, w3=w3.contiguous(), g=g, o=o)
    return o, g.view(batch, 9, dim)


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """dq, dk, dv `(B, h·w, d)` and dw3 `(d, 3, 3)`, as in the reference."""
    (do,), (q, k, v, w3, h, w, scale, damping), (g,) = grads, args, kept
    batch, _, dim = q.shape
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    (do, q, k, v), strides = _launch.dense(do, q, k, v)
    splits, step, read = _planned(q.shape, q.dtype, q.device, h, w, damping, *strides)
    g = g.contiguous()
    dw = w3.new_empty((batch, splits, 9, dim))
    with _launch.on(q):
        read(do=do, q=q, w3=w3.contiguous(), g=g, dq=dq, dw=dw)
        if splits > 1:
            dw = _launch.add_up(dw)
        step(k=k, v=v, g=g, dw=dw, dk=dk, dv=dv, factor=scale)
    return dq, dk, dv, dw.view(batch, 9, dim).mT.sum(0).view(w3.shape)
