"""Triton kernels of deformable attention: a forward pass, and a backward pass by points and pixels.

A *row* is one head of one query, b·Q·H + q·H + h, and has L·P points. A point belongs to the cell
between four pixels, named by its top left pixel. A program of `_forward` and `_backward_points`
loops over the points of some rows. The gradient of the values is gathered instead of scattered:
points are sorted by cell (stably, by 32-bit keys), and the points that touch a pixel are then two
runs of the sorted list, for the two cells that begin in its line and the two above. No atomics add
floats, so the same inputs give the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._op import Args, Grads

MAX_DIM = 128
_INT32 = 2**31 - 1


# ------------------------------------------------------------------------------------------- parts


@triton.jit
def _locate(locations, point, live, width, height, ACC: tl.constexpr):
    """Positions in pixels of a level, with pixel centres at whole numbers."""
    x = tl.load(locations + 2 * point, mask=live, other=0.0).to(ACC)
    y = tl.load(locations + 2 * point + 1, mask=live, other=0.0).to(ACC)
    return x * width - 0.5, y * height - 0.5


@triton.jit
def _axis(x, size, ACC: tl.constexpr):
    """The pixel before x, x's distance from it, and whether it and the next one are on the map."""
    reaches = (x > -1) & (x < size)
    # Huge numbers and NaN must not become integers.
    x = tl.where(reaches, x, 0.0)
    near = tl.floor(x)
    index = near.to(tl.int32)
    return index, x - near, reaches & (index >= 0), reaches & (index + 1 < size)


@triton.jit
def _pixels(value, offset, inside, D: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads a pixel for every row `(ROWS, CHANNELS)`, and zeros where it is not `inside`."""
    channel = tl.arange(0, CHANNELS)
    mask = inside[:, None]
    if CHANNELS != D:
        mask = mask & (channel < D)[None, :]
    return tl.load(value + offset[:, None] + channel[None, :], mask=mask, other=0.0)


# ----------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=['S', 'H', 'Q'])
def _forward(
    value,  # (B, S, H, D)
    shapes,  # (L, 2): height and width
    locations,  # (B, Q, H, L, P, 2)
    weights,  # (B, Q, H, L, P)
    out,  # (B, Q, H, D)
    S,
    H,
    Q,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes O = Σ a·β·value over the points and their four pixels."""
    ACC: tl.constexpr = tl.float64 if value.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(Q * H, ROWS)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * ROWS
    row = tl.arange(0, ROWS)
    live = first + row < Q * H
    head = (first + row) % H
    value += image * S * H * D
    start_row = image * Q * H + first
    locations += start_row * (L * P * 2)
    weights += start_row * (L * P)
    sum_ = tl.zeros((ROWS, CHANNELS), ACC)
    start = 0
    for level in range(L):
        height = tl.load(shapes + 2 * level).to(tl.int32)
        width = tl.load(shapes + 2 * level + 1).to(tl.int32)
        # Triton 3.9's interpreter refuses the mask that `live &` a scalar comparison makes.
        fits = tl.where(start + height * width <= S, live, False)
        for p in tl.range(0, P, loop_unroll_factor=4):
            point = row * (L * P) + level * P + p
            x, y = _locate(locations, point, live, width, height, ACC)
            a = tl.load(weights + point, mask=live, other=0.0).to(ACC)
            # A NaN location makes the output NaN.
            a = tl.where((x == x) & (y == y), a, float('nan'))
            left, fx, near_x, far_x = _axis(x, width, ACC)
            top, fy, near_y, far_y = _axis(y, height, ACC)
            offset = ((start + top * width + left) * H + head) * D
            for far_row in tl.static_range(2):
                for far_column in tl.static_range(2):
                    inside = (far_y if far_row else near_y) & (far_x if far_column else near_x)
                    corner = offset + (far_row * width + far_column) * H * D
                    v = _pixels(value, corner, inside & fits, D, CHANNELS)
                    beta = (fy if far_row else 1 - fy) * (fx if far_column else 1 - fx)
                    sum_ += (a * beta)[:, None] * v.to(ACC)
        start += height * width
    channel = tl.arange(0, CHANNELS)
    out += start_row * D
    tl.store(
        out + row[:, None] * D + channel[None, :],
        sum_.to(out.dtype.element_ty),
        mask=live[:, None] & (channel < D)[None, :],
    )


@triton.jit(do_not_specialize=['S', 'H', 'Q', 'B'])
def _backward_points(
    do,  # (B, Q, H, D)
    value,  # (B, S, H, D)
    shapes,  # (L, 2): height and width
    locations,  # (B, Q, H, L, P, 2)
    weights,  # (B, Q, H, L, P)
    dlocations,  # like locations
    dweights,  # like weights
    keys,  # (B, Q, H, L, P) int32: the cell of every point, (b·H + h)·S + pixel
    S,
    H,
    Q,
    B,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of locations and weights from ⟨value, do⟩ of the four pixels, and the sort keys."""
    ACC: tl.constexpr = tl.float64 if value.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(Q * H, ROWS)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * ROWS
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    live = first + row < Q * H
    head = (first + row) % H
    group = image.to(tl.int32) * H + head
    value += image * S * H * D
    start_row = image * Q * H + first
    start_point = start_row * (L * P)
    locations += 2 * start_point
    dlocations += 2 * start_point
    weights += start_point
    dweights += start_point
    keys += start_point
    tile = start_row * D + row[:, None] * D + channel[None, :]
    tile_live = live[:, None] & (channel < D)[None, :]
    g = tl.load(do + tile, mask=tile_live, other=0.0).to(ACC)
    start = 0
    for level in range(L):
        height = tl.load(shapes + 2 * level).to(tl.int32)
        width = tl.load(shapes + 2 * level + 1).to(tl.int32)
        # Triton 3.9's interpreter refuses the mask that `live &` a scalar comparison makes.
        fits = tl.where(start + height * width <= S, live, False)
        for p in tl.range(0, P, loop_unroll_factor=4):
            point = row * (L * P) + level * P + p
            x, y = _locate(locations, point, live, width, height, ACC)
            a = tl.load(weights + point, mask=live, other=0.0).to(ACC)
            left, fx, near_x, far_x = _axis(x, width, ACC)
            top, fy, near_y, far_y = _axis(y, height, ACC)
            offset = ((start + top * width + left) * H + head) * D
            da = tl.zeros_like(a)
            gx = tl.zeros_like(a)
            gy = tl.zeros_like(a)
            for far_row in tl.static_range(2):
                for far_column in tl.static_range(2):
                    inside = (far_y if far_row else near_y) & (far_x if far_column else near_x)
                    corner = offset + (far_row * width + far_column) * H * D
                    v = _pixels(value, corner, inside & fits, D, CHANNELS).to(ACC)
                    dot = tl.sum(v * g, axis=1)
                    beta_y = fy if far_row else 1 - fy
                    beta_x = fx if far_column else 1 - fx
                    da += beta_y * beta_x * dot
                    gx += (beta_y if far_column else -beta_y) * dot
                    gy += (beta_x if far_row else -beta_x) * dot
            # The gradient of a NaN location is NaN.
            a = tl.where((x == x) & (y == y), a, float('nan'))
            gx = gx * a * width
            gy = gy * a * height
            tl.store(dlocations + 2 * point, gx.to(dlocations.dtype.element_ty), mask=live)
            tl.store(dlocations + 2 * point + 1, gy.to(dlocations.dtype.element_ty), mask=live)
            tl.store(dweights + point, da.to(dweights.dtype.element_ty), mask=live)
            # Points left of a line's first pixel do not touch its second: one cell serves them all.
            cell = start + tl.maximum(top, 0) * width + tl.maximum(left, 0)
            reaches = fits & (near_y | far_y) & (near_x | far_x)
            key = tl.where(reaches, group * S + cell, B * H * S)
            tl.store(keys + point, key, mask=live)
        start += height * width


@triton.jit(do_not_specialize=['S', 'H'])
def _backward_value(
    do,  # (B, Q, H, D)
    shapes,  # (L, 2): height and width
    locations,  # (B, Q, H, L, P, 2)
    weights,  # (B, Q, H, L, P)
    order,  # (B·Q·H·L·P,) int64: points by cell
    starts,  # (B·H·S + 1,) int32: the first of every cell in `order`
    dvalue,  # (B, S, H, D)
    S,
    H,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    POINTS: tl.constexpr,
):
    """Computes dvalue = Σ a·β·do over the points around some neighbouring pixels of a head.

    β is a tent, 1 − distance along both axes, and 0 at points of the four cells that do not touch
    the pixel.
    """
    ACC: tl.constexpr = tl.float64 if dvalue.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(S, PIXELS)
    group = tl.program_id(0) // blocks
    image = (group // H).to(tl.int64)
    head = group % H
    pixel = tl.program_id(0) % blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    # Level of every pixel, and its position there.
    row = tl.zeros_like(pixel)
    column = tl.zeros_like(pixel)
    live = pixel < 0
    height = tl.full((PIXELS,), 1, tl.int32)
    width = tl.full((PIXELS,), 1, tl.int32)
    start = 0
    for level in tl.static_range(L):
        h = tl.load(shapes + 2 * level).to(tl.int32)
        w = tl.load(shapes + 2 * level + 1).to(tl.int32)
        within = (pixel >= start) & (pixel < start + h * w)
        row = tl.where(within, (pixel - start) // w, row)
        column = tl.where(within, (pixel - start) % w, column)
        live = live | within
        height = tl.where(within, h, height)
        width = tl.where(within, w, width)
        start += h * w
    live = live & (pixel < S)
    # The cells (row − 1, column − 1), (row − 1, column) are neighbours in the list; so are the two
    # of this line.
    cell = group * S + pixel
    before = tl.where(column > 0, 1, 0)
    upper = live & (row > 0)
    first = tl.load(starts + cell - before, mask=live, other=0)
    count = tl.load(starts + cell + 1, mask=live, other=0) - first
    first_above = tl.load(starts + cell - width - before, mask=upper, other=0)
    count_above = tl.load(starts + cell - width + 1, mask=upper, other=0) - first_above
    sum_ = tl.zeros((PIXELS, POINTS, CHANNELS), ACC)
    for n in tl.range(0, tl.max(count + count_above), POINTS):
        i = (n + tl.arange(0, POINTS))[None, :]
        above = i < count_above[:, None]
        near = i < (count + count_above)[:, None]
        slot = tl.where(above, first_above[:, None] + i, (first - count_above)[:, None] + i)
        point = tl.load(order + slot, mask=near, other=0).to(tl.int32)
        reader = point // (L * P)
        x, y = _locate(locations, point, near, width[:, None], height[:, None], ACC)
        tent_x = tl.maximum(1 - tl.abs(x - column[:, None]), 0.0)
        tent_y = tl.maximum(1 - tl.abs(y - row[:, None]), 0.0)
        a = tl.load(weights + point, mask=near, other=0.0).to(ACC) * tent_x * tent_y
        mask = near[:, :, None]
        if CHANNELS != D:
            mask = mask & (channel < D)[None, None, :]
        g = tl.load(
            do + (reader.to(tl.int64) * D)[:, :, None] + channel[None, None, :],
            mask=mask,
            other=0.0,
        )
        sum_ += a[:, :, None] * g.to(ACC)
    dvalue += (image * S * H + head) * D
    tl.store(
        dvalue + (pixel * H * D)[:, None] + channel[None, :],
        tl.sum(sum_, axis=1).to(dvalue.dtype.element_ty),
        mask=(pixel < S)[:, None] & (channel < D)[None, :],
    )


@triton.jit(do_not_specialize=['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'])
def _write_shapes(shapes, a, b, c, d, e, f, g, h, L: tl.constexpr):
    """Unpacks pairs of numbers below 2³² to where the other kernels load them."""
    pairs = (a, b, c, d, e, f, g, h)
    for level in tl.static_range(L):
        tl.store(shapes + 2 * level, pairs[level] >> 32)
        tl.store(shapes + 2 * level + 1, pairs[level] & 0xFFFFFFFF)


# -------------------------------------------------------------------------------------------- host


# Levels whose sizes are arguments of a kernel.
_MOST_LEVELS = 8


def config(kernel: str, dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Compile options of a kernel for values of `dtype` with `dim` channels, the same for all GPUs.

    A thread holds 16 bytes of a pixel, one load. All threads that share a point repeat its
    computations. The dot products of `_backward_points` move between threads on their way to
    memory: within one warp that needs no barrier.
    """
    channels = _launch.power_of_2(dim)
    together = max(32 * 16 // (channels * dtype.itemsize), 1)  # pixels that a warp loads at once
    if kernel == 'backward_value':
        return {'CHANNELS': channels, 'PIXELS': 4, 'POINTS': together, 'num_warps': 4}
    warps = 1 if kernel == 'backward_points' else 4
    return {'CHANNELS': channels, 'ROWS': together * warps, 'num_warps': warps}


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments, or None where they can."""
    value, _, _, locations, weights = args
    batch, pixels, heads, dim = value.shape
    if dim > MAX_DIM:
        return f'd is {dim}; the kernels have at most {MAX_DIM}'
    if weights.numel() == 0:
        return 'there are no queries'
    if max(pixels * heads * dim, batch * heads * pixels, locations.numel()) > _INT32:
        return 'the tensors need 64-bit indices, which the kernels do not have'
    return _launch.unsupported_reason(value)


def _on_device(levels: Sequence[int], value: Tensor) -> Tensor:
    """Sizes of the levels `(L, 2)` on the device of `value`.

    A kernel writes them: a copy would wait for the GPU, and a tensor cached for the next call might
    belong to the memory pool of a CUDA graph.
    """
    count = len(levels) // 2
    if count > _MOST_LEVELS:
        return torch.tensor(levels, device=value.device).view(-1, 2)
    shapes = torch.empty((count, 2), dtype=torch.int64, device=value.device)
    with _launch.on(value):
        _writer(tuple(levels), value.device)(shapes=shapes)
    return shapes


@_launch.plan
def _writer(levels: tuple[int, ...], device: torch.device) -> _launch.Launch:
    pairs = [h << 32 | w for h, w in zip(levels[::2], levels[1::2], strict=True)]
    pairs += [1 << 32] * (_MOST_LEVELS - len(pairs))
    numbers = dict(zip('abcdefgh', pairs, strict=True))
    return _launch.Launch(_write_shapes, (1,), **numbers, L=len(levels) // 2, num_warps=1)


@_launch.plan
def _planned(
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    locations: tuple[int, ...],
) -> _launch.Launch:
    """The launch of a kernel for values and locations of these shapes."""
    (batch, pixels, heads, dim), (_, queries, _, levels, points, _) = shape, locations
    sizes = {'S': pixels, 'H': heads, 'L': levels, 'P': points, 'D': dim}
    sizes |= config(name, dtypes[0], dim)
    if name == 'backward_value':
        grid = (batch * heads * _launch.cdiv(pixels, sizes['PIXELS']),)
    else:
        grid = (batch * _launch.cdiv(queries * heads, sizes['ROWS']),)
        sizes['Q'] = queries
    if name == 'backward_points':
        sizes['B'] = batch
    return _launch.Launch(_KERNELS[name], grid, **sizes)


def _layout(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> tuple:
    dtypes = value.dtype, shapes.dtype, locations.dtype, weights.dtype
    return value.shape, dtypes, value.device, locations.shape


_KERNELS = {
    'forward': _forward,
    'backward_points': _backward_points,
    'backward_value': _backward_value,
}


def forward(args: Args, keep: bool = True) -> Tensor:
    """O `(B, Q, H·d)`, as in the reference."""
    value, levels, shapes, locations, weights = args
    batch, _, heads, dim = value.shape
    out = value.new_empty((batch, locations.shape[1], heads * dim))
    shapes = _on_device(levels, value) if shapes is None else shapes.contiguous()
    with _launch.on(value):
        _planned('forward', *_layout(value, shapes, locations, weights))(
            value=value.contiguous(),
            shapes=shapes,
            locations=locations.contiguous(),
            weights=weights.contiguous(),
            out=out,
        )
    return out


def backward(grads: Grads, args: Args, kept: Args) -> Grads:
    """dvalue, None, dlocations, dweights."""
    (do,), (value, levels, shapes, locations, weights) = grads, args
    batch, pixels, heads, _ = value.shape
    dvalue, dlocations, dweights = (
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (value, locations, weights)
    )
    keys = torch.empty(weights.numel(), dtype=torch.int32, device=value.device)
    tensors = {
        'do': do.contiguous(),
        'shapes': _on_device(levels, value) if shapes is None else shapes.contiguous(),
        'locations': locations.contiguous(),
        'weights': weights.contiguous(),
    }
    layout = _layout(value, tensors['shapes'], locations, weights)
    with _launch.on(value):
        _planned('backward_points', *layout)(
            value=value.contiguous(), dlocations=dlocations, dweights=dweights, keys=keys, **tensors
        )
        keys, order = keys.sort(stable=True)
        cells = torch.arange(batch * heads * pixels + 1, dtype=torch.int32, device=value.device)
        starts = torch.searchsorted(keys, cells, out_int32=True)
        _planned('backward_value', *layout)(order=order, starts=starts, dvalue=dvalue, **tensors)
    return dvalue, None, dlocations, dweights
