"""Triton kernels of deformable attention: one forward; backward by points, a sort, then by pixels.

A *row* is one head of one query, b·Q·H + q·H + h, and has L·P points; a point belongs to the cell
between four pixels, named by its top left pixel. A program of `_forward` and `_backward_points`
loops over the points of some rows. The gradient of the values is gathered instead of scattered:
points are sorted by cell (stably, by 32-bit keys), and the points that touch a pixel are then two
runs of the sorted list, for the two cells that begin in its line and the two above. No atomics add
floats, so the same inputs give the same bits.

With FUSED, `places` are offsets in pixels from `reference`, and `weights` are logits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch

MAX_DIM = 128
_INT32 = 2**31 - 1


# ------------------------------------------------------------------------------------------- parts


@triton.jit
def _locate(
    places, reference, point, here, live, width, height, FUSED: tl.constexpr, ACC: tl.constexpr
):
    """Positions in pixels of a level; pixel centres are whole numbers."""
    x = tl.load(places + 2 * point, mask=live, other=0.0).to(ACC)
    y = tl.load(places + 2 * point + 1, mask=live, other=0.0).to(ACC)
    if FUSED:
        x += tl.load(reference + 2 * here, mask=live, other=0.0).to(ACC) * width
        y += tl.load(reference + 2 * here + 1, mask=live, other=0.0).to(ACC) * height
    else:
        x *= width
        y *= height
    return x - 0.5, y - 0.5


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
def _pixels(
    value,
    offset,
    step_y,
    step_x,
    near_y,
    far_y,
    near_x,
    far_x,
    FAR_ROW: tl.constexpr,
    FAR_COLUMN: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Loads one of the four pixels around every row's point `(ROWS, CHANNELS)`; zeros outside."""
    offset += FAR_ROW * step_y + FAR_COLUMN * step_x
    channel = tl.arange(0, CHANNELS)
    mask = ((far_y if FAR_ROW else near_y) & (far_x if FAR_COLUMN else near_x))[:, None]
    if CHANNELS != D:
        mask = mask & (channel < D)[None, :]
    return tl.load(value + offset[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _softmax_statistics(logits, first, live, COUNT: tl.constexpr, ACC: tl.constexpr):
    """Largest logit and sum of exponentials of every row."""
    peak = tl.load(logits + first, mask=live, other=0.0).to(ACC)
    for i in tl.static_range(1, COUNT):
        peak = tl.maximum(peak, tl.load(logits + first + i, mask=live, other=0.0).to(ACC))
    total = tl.zeros_like(peak)
    for i in tl.static_range(COUNT):
        total += tl.exp(tl.load(logits + first + i, mask=live, other=0.0).to(ACC) - peak)
    return peak, total


# ----------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=['S', 'H', 'Q', 'reference_b'])
def _forward(
    value,  # (B, S, H, D)
    shapes,  # (L, 2): height and width
    reference,  # (B or 1, Q, L, 2) if FUSED
    places,  # (B, Q, H, L, P, 2)
    weights,  # (B, Q, H, L, P)
    out,  # (B, Q, H, D)
    S,
    H,
    Q,
    reference_b,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    FUSED: tl.constexpr,
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
    reference += image * reference_b
    start_row = image * Q * H + first
    places += start_row * (L * P * 2)
    weights += start_row * (L * P)
    if FUSED:
        peak, total = _softmax_statistics(weights, row * (L * P), live, L * P, ACC)
    sum_ = tl.zeros((ROWS, CHANNELS), ACC)
    start = 0
    for level in range(L):
        height = tl.load(shapes + 2 * level).to(tl.int32)
        width = tl.load(shapes + 2 * level + 1).to(tl.int32)
        # Triton 3.9's interpreter refuses the mask that `live &` a scalar comparison makes.
        fits = tl.where(start + height * width <= S, live, False)
        here = (first + row) // H * L + level
        for p in tl.range(0, P, loop_unroll_factor=4):
            point = row * (L * P) + level * P + p
            x, y = _locate(places, reference, point, here, live, width, height, FUSED, ACC)
            a = tl.load(weights + point, mask=live, other=0.0).to(ACC)
            if FUSED:
                a = tl.exp(a - peak)
            # A NaN location makes the output NaN.
            a = tl.where((x == x) & (y == y), a, float('nan'))
            left, fx, near_x, far_x = _axis(x, width, ACC)
            top, fy, near_y, far_y = _axis(y, height, ACC)
            offset = ((start + top * width + left) * H + head) * D
            for far_row in tl.static_range(2):
                for far_column in tl.static_range(2):
                    v = _pixels(
                        value,
                        offset,
                        width * H * D,
                        H * D,
                        near_y & fits,
                        far_y & fits,
                        near_x,
                        far_x,
                        far_row,
                        far_column,
                        D,
                        CHANNELS,
                    )
                    beta = (fy if far_row else 1 - fy) * (fx if far_column else 1 - fx)
                    sum_ += (a * beta)[:, None] * v.to(ACC)
        start += height * width
    if FUSED:
        sum_ = sum_ / total[:, None]
    channel = tl.arange(0, CHANNELS)
    out += start_row * D
    tl.store(
        out + row[:, None] * D + channel[None, :],
        sum_.to(out.dtype.element_ty),
        mask=live[:, None] & (channel < D)[None, :],
    )


@triton.jit(do_not_specialize=['S', 'H', 'Q', 'B', 'reference_b'])
def _backward_points(
    do,  # (B, Q, H, D)
    value,  # (B, S, H, D)
    shapes,  # (L, 2): height and width
    reference,  # (B or 1, Q, L, 2) if FUSED
    places,  # (B, Q, H, L, P, 2)
    weights,  # (B, Q, H, L, P)
    out,  # (B, Q, H, D) if FUSED
    dplaces,  # like places
    dweights,  # like weights
    attention,  # (B, Q, H, L, P) if FUSED: the weights after the softmax
    keys,  # (B, Q, H, L, P) int32: the cell of every point, (b·H + h)·S + pixel
    S,
    H,
    Q,
    B,
    reference_b,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Gradients of places and weights from ⟨value, do⟩ of the four pixels, and the sort keys."""
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
    reference += image * reference_b
    start_row = image * Q * H + first
    start_point = start_row * (L * P)
    places += 2 * start_point
    dplaces += 2 * start_point
    weights += start_point
    dweights += start_point
    attention += start_point
    keys += start_point
    tile = start_row * D + row[:, None] * D + channel[None, :]
    tile_live = live[:, None] & (channel < D)[None, :]
    g = tl.load(do + tile, mask=tile_live, other=0.0).to(ACC)
    if FUSED:
        peak, total = _softmax_statistics(weights, row * (L * P), live, L * P, ACC)
        # Σ a·da over a row is ⟨o, do⟩.
        mean = tl.sum(tl.load(out + tile, mask=tile_live, other=0.0).to(ACC) * g, axis=1)
    start = 0
    for level in range(L):
        height = tl.load(shapes + 2 * level).to(tl.int32)
        width = tl.load(shapes + 2 * level + 1).to(tl.int32)
        # Triton 3.9's interpreter refuses the mask that `live &` a scalar comparison makes.
        fits = tl.where(start + height * width <= S, live, False)
        here = (first + row) // H * L + level
        for p in tl.range(0, P, loop_unroll_factor=4):
            point = row * (L * P) + level * P + p
            x, y = _locate(places, reference, point, here, live, width, height, FUSED, ACC)
            a = tl.load(weights + point, mask=live, other=0.0).to(ACC)
            if FUSED:
                a = tl.exp(a - peak) / total
                tl.store(attention + point, a, mask=live)
            left, fx, near_x, far_x = _axis(x, width, ACC)
            top, fy, near_y, far_y = _axis(y, height, ACC)
            offset = ((start + top * width + left) * H + head) * D
            da = tl.zeros_like(a)
            gx = tl.zeros_like(a)
            gy = tl.zeros_like(a)
            for far_row in tl.static_range(2):
                for far_column in tl.static_range(2):
                    v = _pixels(
                        value,
                        offset,
                        width * H * D,
                        H * D,
                        near_y & fits,
                        far_y & fits,
                        near_x,
                        far_x,
                        far_row,
                        far_column,
                        D,
                        CHANNELS,
                    ).to(ACC)
                    dot = tl.sum(v * g, axis=1)
                    beta_y = fy if far_row else 1 - fy
                    beta_x = fx if far_column else 1 - fx
                    da += beta_y * beta_x * dot
                    gx += (beta_y if far_column else -beta_y) * dot
                    gy += (beta_x if far_row else -beta_x) * dot
            # The gradient of a NaN location is NaN.
            a = tl.where((x == x) & (y == y), a, float('nan'))
            gx = gx * a
            gy = gy * a
            if FUSED:
                da = a * (da - mean)
            else:
                gx = gx * width
                gy = gy * height
            tl.store(dplaces + 2 * point, gx.to(dplaces.dtype.element_ty), mask=live)
            tl.store(dplaces + 2 * point + 1, gy.to(dplaces.dtype.element_ty), mask=live)
            tl.store(dweights + point, da.to(dweights.dtype.element_ty), mask=live)
            # Points left of a line's first pixel do not touch its second: one cell serves them all.
            cell = start + tl.maximum(top, 0) * width + tl.maximum(left, 0)
            reaches = fits & (near_y | far_y) & (near_x | far_x)
            key = tl.where(reaches, group * S + cell, B * H * S)
            tl.store(keys + point, key, mask=live)
        start += height * width


@triton.jit(do_not_specialize=['S', 'H', 'Q', 'reference_b'])
def _backward_value(
    do,  # (B, Q, H, D)
    shapes,  # (L, 2): height and width
    reference,  # (B or 1, Q, L, 2) if FUSED
    places,  # (B, Q, H, L, P, 2)
    attention,  # (B, Q, H, L, P)
    order,  # (B·Q·H·L·P,) int64: points by cell
    starts,  # (B·H·S + 1,) int32: the first of every cell in `order`
    dvalue,  # (B, S, H, D)
    S,
    H,
    Q,
    reference_b,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    POINTS: tl.constexpr,
    FUSED: tl.constexpr,
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
    level = tl.full((PIXELS,), -1, tl.int32)
    height = tl.full((PIXELS,), 1, tl.int32)
    width = tl.full((PIXELS,), 1, tl.int32)
    start = 0
    for lv in tl.static_range(L):
        h = tl.load(shapes + 2 * lv).to(tl.int32)
        w = tl.load(shapes + 2 * lv + 1).to(tl.int32)
        within = (pixel >= start) & (pixel < start + h * w)
        row = tl.where(within, (pixel - start) // w, row)
        column = tl.where(within, (pixel - start) % w, column)
        level = tl.where(within, lv, level)
        height = tl.where(within, h, height)
        width = tl.where(within, w, width)
        start += h * w
    live = (level >= 0) & (pixel < S)
    # The cells (row − 1, column − 1), (row − 1, column) are neighbours in the list; so are the two
    # of this line.
    cell = group * S + pixel
    before = tl.where(column > 0, 1, 0)
    upper = live & (row > 0)
    first = tl.load(starts + cell - before, mask=live, other=0)
    count = tl.load(starts + cell + 1, mask=live, other=0) - first
    first_above = tl.load(starts + cell - width - before, mask=upper, other=0)
    count_above = tl.load(starts + cell - width + 1, mask=upper, other=0) - first_above
    reference += image * reference_b
    sum_ = tl.zeros((PIXELS, POINTS, CHANNELS), ACC)
    for n in tl.range(0, tl.max(count + count_above), POINTS):
        i = (n + tl.arange(0, POINTS))[None, :]
        above = i < count_above[:, None]
        near = i < (count + count_above)[:, None]
        slot = tl.where(above, first_above[:, None] + i, (first - count_above)[:, None] + i)
        point = tl.load(order + slot, mask=near, other=0).to(tl.int32)
        reader = point // (L * P)
        here = (reader // H - image.to(tl.int32) * Q) * L + level[:, None]
        x, y = _locate(
            places,
            reference,
            point,
            here,
            near,
            width[:, None],
            height[:, None],
            FUSED,
            ACC,
        )
        tent_x = tl.maximum(1 - tl.abs(x - column[:, None]), 0.0)
        tent_y = tl.maximum(1 - tl.abs(y - row[:, None]), 0.0)
        a = tl.load(attention + point, mask=near, other=0.0).to(ACC) * tent_x * tent_y
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
def _write_sizes(sizes, a, b, c, d, e, f, g, h, L: tl.constexpr):
    """Unpacks pairs of numbers below 2³² to where the other kernels load them."""
    pairs = (a, b, c, d, e, f, g, h)
    for level in tl.static_range(L):
        tl.store(sizes + 2 * level, pairs[level] >> 32)
        tl.store(sizes + 2 * level + 1, pairs[level] & 0xFFFFFFFF)


# -------------------------------------------------------------------------------------------- host


# Levels whose sizes are arguments of a kernel.
_MOST_LEVELS = 8


def config(kernel: str, dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Options to compile a kernel for values of `dtype` with `dim` channels; the same for all GPUs.

    A thread holds 16 bytes of a pixel, one load; all threads that share a point repeat its
    computations. The dot products of `_backward_points` move between threads on their way to
    memory: within one warp that needs no barrier.
    """
    channels = _launch.power_of_2(dim)
    together = max(32 * 16 // (channels * dtype.itemsize), 1)  # pixels that a warp loads at once
    if kernel == 'backward_value':
        return {'CHANNELS': channels, 'PIXELS': 4, 'POINTS': together, 'num_warps': 4}
    warps = 1 if kernel == 'backward_points' else 4
    return {'CHANNELS': channels, 'ROWS': together * warps, 'num_warps': warps}


def unsupported_reason(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference: Tensor | None,
    places: Tensor,
    weights: Tensor,
) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    batch, pixels, heads, dim = value.shape
    if dim > MAX_DIM:
        return f'd is {dim}; the kernels have at most {MAX_DIM}'
    if weights.numel() == 0:
        return 'there are no queries'
    if max(pixels * heads * dim, batch * heads * pixels, places.numel()) > _INT32:
        return 'the tensors need 64-bit indices, which the kernels do not have'
    return _launch.unsupported_reason(value)


def _on_device(shapes: Sequence[int], value: Tensor) -> Tensor:
    """Sizes of the levels `(L, 2)` on the device of `value`.

    A kernel writes them: a copy would wait for the GPU, and a tensor cached for the next call might
        belong to the memory pool of a CUDA graph.
    """
    levels = len(shapes) // 2
    if levels > _MOST_LEVELS:
        return torch.tensor(shapes, device=value.device).view(-1, 2)
    sizes = torch.empty((levels, 2), dtype=torch.int64, device=value.device)
    with _launch.on(value):
        _writer(tuple(shapes))(sizes=sizes)
    return sizes


@_launch.plan
def _writer(shapes: tuple[int, ...]) -> Callable[..., Any]:
    pairs = [h << 32 | w for h, w in zip(shapes[::2], shapes[1::2], strict=True)]
    pairs += [1 << 32] * (_MOST_LEVELS - len(pairs))
    numbers = dict(zip('abcdefgh', pairs, strict=True))
    return _launch.launcher(_write_sizes, (1,), **numbers, L=len(shapes) // 2, num_warps=1)


@_launch.plan
def _planned(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, places: tuple[int, ...], step: int | None
) -> Callable[..., Any]:
    """The launch of a kernel; `step`: elements between the reference points of two images."""
    (batch, pixels, heads, dim), (_, queries, _, levels, points, _) = shape, places
    options, kernel = config(name, dtype, dim), _KERNELS[name]
    rows, count = ('PIXELS', pixels) if name == 'backward_value' else ('ROWS', queries * heads)
    blocks = _launch.cdiv(count, options[rows])
    grid = (batch * (heads * blocks if name == 'backward_value' else blocks),)
    sizes = {'S': pixels, 'H': heads, 'Q': queries, 'L': levels, 'P': points, 'D': dim}
    fused = {'reference_b': step or 0, 'FUSED': step is not None}
    if name == 'backward_points':
        options['B'] = batch
    return _launch.launcher(kernel, grid, **sizes, **fused, **options)


_KERNELS = {
    'forward': _forward,
    'backward_points': _backward_points,
    'backward_value': _backward_value,
}


def _arguments(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference: Tensor | None,
    places: Tensor,
) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
    """Tensors that all kernels take, and the layout for `_planned`."""
    step = None
    if reference is not None:
        # Reference points may be the same for all images.
        step = reference[0].numel() if reference.shape[0] > 1 else 0
    tensors = {
        'shapes': _on_device(shapes, value) if levels is None else levels.contiguous(),
        # A missing tensor is a pointer that is not read.
        'reference': places if reference is None else reference.contiguous(),
        'places': places.contiguous(),
    }
    return tensors, (value.shape, value.dtype, places.shape, step)


def forward(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference: Tensor | None,
    places: Tensor,
    weights: Tensor,
) -> Tensor:
    """O `(B, Q, H·d)`; sizes of the levels as numbers in `shapes`, or in `levels` `(L, 2)`."""
    batch, _, heads, dim = value.shape
    out = value.new_empty((batch, places.shape[1], heads * dim))
    tensors, layout = _arguments(value, shapes, levels, reference, places)
    with _launch.on(value):
        _planned('forward', *layout)(
            value=value.contiguous(), weights=weights.contiguous(), out=out, **tensors
        )
    return out


def backward(
    do: Tensor,
    out: Tensor | None,
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference: Tensor | None,
    places: Tensor,
    weights: Tensor,
    move: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dreference (empty unless `move`), dvalue, dplaces, dweights.

    `out` of the forward pass is needed with a `reference`.
    """
    batch, pixels, heads, _ = value.shape
    wide = torch.promote_types(value.dtype, torch.float32)
    dvalue = torch.empty_like(value, memory_format=torch.contiguous_format)
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    # Gradients of reference points sum the offsets' gradients before these are rounded.
    dplaces = torch.empty(places.shape, dtype=wide if move else places.dtype, device=places.device)
    keys = torch.empty(weights.numel(), dtype=torch.int32, device=value.device)
    weights = weights.contiguous()
    attention = weights
    if reference is not None:
        attention = torch.empty_like(weights, dtype=wide)
    tensors, layout = _arguments(value, shapes, levels, reference, places)
    do = do.contiguous()
    with _launch.on(value):
        _planned('backward_points', *layout)(
            do=do,
            value=value.contiguous(),
            weights=weights,
            out=do if out is None else out,
            dplaces=dplaces,
            dweights=dweights,
            attention=attention,
            keys=keys,
            **tensors,
        )
        keys, order = keys.sort(stable=True)
        cells = torch.arange(batch * heads * pixels + 1, dtype=torch.int32, device=value.device)
        starts = torch.searchsorted(keys, cells, out_int32=True)
        _planned('backward_value', *layout)(
            do=do, attention=attention, order=order, starts=starts, dvalue=dvalue, **tensors
        )
    dreference = value.new_empty(0)
    if move:
        sizes = tensors['shapes'].view(-1, 2).flip(-1)
        dreference = (dplaces.sum((2, 4)) * sizes).sum_to_size(reference.shape)
    return dreference, dvalue, dplaces.to(places.dtype), dweights
