"""Triton kernels of the causal convolutions: one pass forward, one backward.

A tile has tokens as rows and channels as columns. A token and its past are K loads. The caches
serve all but one. In the backward pass these are loads of the outputs' gradients, which give both
dx and dw. A program has a span of tokens of one scan of one image and writes its partial sums,
which are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._op import Args, Grads
from .._triton import share_of, store
from .reference import completed

# Triton knows no starred tuples.
# ruff: noqa: RUF005

# Largest number of taps whose sums fit in a program's registers, for two weights.
MOST_TAPS = 8


@triton.jit
def _load(base, tokens, stride, channels, T, C):
    """Loads the rows `tokens`, and zeros outside 0…T − 1."""
    inside = ((tokens >= 0) & (tokens < T))[:, None] & (channels < C)[None, :]
    pointers = base + tokens.to(tl.int64)[:, None] * stride + channels[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _taps(weight, channels, C, TAPS: tl.constexpr):
    """Loads the weights of every channel, from the oldest token to the token itself."""
    taps = ()
    for tap in tl.static_range(TAPS):
        taps = taps + (tl.load(weight + channels * TAPS + tap, mask=channels < C, other=0.0),)
    return taps


@triton.jit
def _past(r, reverse_mask):
    """Sign of the direction of a scan's past: −1, or 1 in a 'backward' scan."""
    return tl.where(((reverse_mask >> r) & 1) != 0, 1, -1)


@triton.jit(do_not_specialize=['T', 'R', 'reverse_mask'])
def _forward(
    x,  # (B, T, R, C), any strides but the last
    weight,  # (R, C, TAPS)
    other,
    y,  # (B, T, R, C)
    z,
    x_strides,
    T,
    R,
    C,
    reverse_mask,
    TAPS: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Computes y (and z) of ROWS tokens."""
    ACC: tl.constexpr = weight.dtype.element_ty
    blocks = tl.cdiv(T, ROWS)
    scan = tl.program_id(0) // blocks
    tokens = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image, r = (scan // R).to(tl.int64), scan % R
    x += image * x_strides[0] + r.to(tl.int64) * x_strides[2]
    way = _past(r, reverse_mask)
    w = _taps(weight + r * C * TAPS, channels, C, TAPS)
    if BOTH:
        w2 = _taps(other + r * C * TAPS, channels, C, TAPS)
    sum_y = tl.zeros((ROWS, CHANNELS), ACC)
    sum_z = tl.zeros((ROWS, CHANNELS), ACC)
    for tap in tl.static_range(TAPS):
        seen = _load(x, tokens + way * (TAPS - 1 - tap), x_strides[1], channels, T, C).to(ACC)
        sum_y += seen * w[tap][None, :]
        if BOTH:
            sum_z += seen * w2[tap][None, :]
    start = image * T * R * C + r * C
    store(y + start, tokens, T, R * C, channels, C, sum_y)
    if BOTH:
        store(z + start, tokens, T, R * C, channels, C, sum_z)


@triton.jit
def _add_products(sums, seen, x, tap: tl.constexpr, TAPS: tl.constexpr):
    """`sums`, with seen·x added to the sum of `tap`."""
    out = ()
    for i in tl.static_range(TAPS):
        out = out + (sums[i] + seen * x if i == tap else sums[i],)
    return out


@triton.jit(do_not_specialize=['T', 'R', 'reverse_mask', 'span', 'splits'])
def _backward(
    dy,  # (B, T, R, C), any strides but the last
    dz,
    x,
    weight,  # (R, C, TAPS)
    other,
    dx,  # (B, T, R, C)
    dweight,  # (B, R, splits, TAPS, C)
    dother,
    dy_strides,
    dz_strides,
    x_strides,
    T,
    R,
    C,
    reverse_mask,
    span,
    splits,
    TAPS: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Computes dx and the contributions to dw of a span of tokens.

    Token t is read by t, t + 1, …, t + K − 1 along the scan: dx[t] = Σ_j w[j]·dy[t ± (K − 1 − j)]
    and dw[j] = Σ_t x[t]·dy[t ± (K − 1 − j)].
    """
    ACC: tl.constexpr = weight.dtype.element_ty
    scan, first, last = share_of(splits, span, T)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image, r = (scan // R).to(tl.int64), scan % R
    dy += image * dy_strides[0] + r.to(tl.int64) * dy_strides[2]
    dz += image * dz_strides[0] + r.to(tl.int64) * dz_strides[2]
    x += image * x_strides[0] + r.to(tl.int64) * x_strides[2]
    dx += image * T * R * C + r * C
    way = -_past(r, reverse_mask)
    w = _taps(weight + r * C * TAPS, channels, C, TAPS)
    sums, sums2 = (), ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros((ROWS, CHANNELS), ACC),)
    if BOTH:
        w2 = _taps(other + r * C * TAPS, channels, C, TAPS)
        for _ in tl.static_range(TAPS):
            sums2 = sums2 + (tl.zeros((ROWS, CHANNELS), ACC),)
    for n in tl.range(first, last, ROWS):
        tokens = n + tl.arange(0, ROWS)
        here = _load(x, tokens, x_strides[1], channels, last, C).to(ACC)
        total = tl.zeros((ROWS, CHANNELS), ACC)
        for tap in tl.static_range(TAPS):
            readers = tokens + way * (TAPS - 1 - tap)
            seen = _load(dy, readers, dy_strides[1], channels, T, C).to(ACC)
            total += seen * w[tap][None, :]
            sums = _add_products(sums, seen, here, tap, TAPS)
            if BOTH:
                seen = _load(dz, readers, dz_strides[1], channels, T, C).to(ACC)
                total += seen * w2[tap][None, :]
                sums2 = _add_products(sums2, seen, here, tap, TAPS)
        store(dx, tokens, last, R * C, channels, C, total)
    place = tl.program_id(0).to(tl.int64) * TAPS * C + channels
    for tap in tl.static_range(TAPS):
        tl.store(dweight + place + tap * C, tl.sum(sums[tap], axis=0), mask=channels < C)
        if BOTH:
            tl.store(dother + place + tap * C, tl.sum(sums2[tap], axis=0), mask=channels < C)


# -------------------------------------------------------------------------------------------- host


# Tokens of a block by pass, and warps. A thread holds eight channels (16 bytes in half precision)
# of two tokens forward, and of one token backward, where it keeps sums for every tap.
_ROWS = {'forward': 32, 'backward': 16}
_CHANNELS = 64
_WARPS = 4


def config(kernel: str, channels: int) -> dict[str, int]:
    """Compile options of a kernel for C channels, which depend on neither dtype nor GPU."""
    columns = min(_CHANNELS, max(_launch.power_of_2(channels), 16))
    rows = _ROWS[kernel] * _CHANNELS // columns
    return {'ROWS': rows, 'CHANNELS': columns, 'num_warps': _WARPS}


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments, or None where they can."""
    x, weight = args.x, args.weight
    if weight.shape[-1] > MOST_TAPS:
        return f'K is {weight.shape[-1]}; the kernels have at most {MOST_TAPS} taps'
    return _launch.unsupported_scans_reason(x.shape[2]) or _launch.unsupported_reason(x)


@_launch.plan
def _planned(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    taps: int,
    both: bool,
    ways: str,
    *strides: tuple[int, ...],
) -> tuple[int, _launch.Launch]:
    """Splits of each sum, and a launch. Strides are x's, in the backward pass dy's, dz's, x's."""
    *grads, x = strides
    batch, tokens, scans, channels = shape
    options = config('backward' if grads else 'forward', channels)
    blocks = _launch.cdiv(channels, options['CHANNELS'])
    options |= {'T': tokens, 'R': scans, 'C': channels, 'TAPS': taps, 'BOTH': both}
    options['reverse_mask'] = _launch.reverse_mask(ways)
    options |= _launch.token_strides(**dict(zip(('dy', 'dz'), grads, strict=False)), x=x)
    if not grads:
        kernel, splits = _forward, _launch.cdiv(tokens, options['ROWS'])
    else:
        kernel = _backward
        splits, span = _launch.split(tokens, batch * scans * blocks, options['ROWS'])
        options |= {'splits': splits, 'span': span}
    return splits, _launch.Launch(kernel, (batch * scans * splits, blocks), **options)


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Computes `reference.forward`."""
    x, weight, other, ways = args
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    z = x.new_empty(0) if other is None else torch.empty_like(y)
    (x,), strides = _launch.dense(x)
    weight, both = weight.contiguous(), other is not None
    # A missing tensor is a pointer that is not read.
    other = weight if other is None else other.contiguous()
    layout = x.shape, x.dtype, x.device
    _, launch = _planned(*layout, weight.shape[-1], both, ways, *strides)
    with _launch.on(x):
        launch(y=y, z=z, x=x, weight=weight, other=other)
    return y, z


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.backward`."""
    x, weight, other, ways = args
    dy, dz = completed(grads, other)
    batch, _, scans, channels = x.shape
    taps, both = weight.shape[-1], other is not None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    (dy, dz, x), strides = _launch.dense(dy, dy if dz is None else dz, x)
    weight = weight.contiguous()
    other = weight if other is None else other.contiguous()
    splits, launch = _planned(x.shape, x.dtype, x.device, taps, both, ways, *strides)
    dweight = weight.new_empty((batch, scans, splits, taps, channels))
    dother = torch.empty_like(dweight) if both else weight.new_empty(0)
    with _launch.on(x):
        launch(dy=dy, dz=dz, x=x, weight=weight, other=other, dx=dx, dweight=dweight, dother=dother)
    dweight = dweight.mT.sum((0, 2))
    return dx, dweight, dother.mT.sum((0, 2)) if both else dother
