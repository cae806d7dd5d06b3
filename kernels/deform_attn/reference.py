"""Multi-scale deformable attention in plain PyTorch: the executable specification.

Deformable DETR, Eq. 3 (the ViT-Adapter's attention): every query samples L·P points of a feature
pyramid by bilinear interpolation with zeros outside, and adds them with its own weights.

A point is four pixels with four weights, so the whole op is one weighted sum of rows of `value`:
`torch.nn.functional.embedding_bag`, which never stores the rows it reads. Its transpose, the
gradient of `value`, is the same sum with rows and queries swapped, after a sort.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inputs import state_dtype
from .._op import Args, Grads


class _Axis(NamedTuple):
    """The two neighbours of every point along one axis, `(B, Q, H, P)` each."""

    near: Tensor  # index, in the image
    far: Tensor
    near_weight: Tensor  # 0 if the neighbour lies outside
    far_weight: Tensor
    near_slope: Tensor  # d near_weight / d location
    far_slope: Tensor

    @classmethod
    def of(cls, location: Tensor, size: int) -> '_Axis':
        """`location` in [0, 1] over `size` pixels with centres at (i + ½)/size."""
        x = location * size - 0.5
        # More than one pixel outside nothing changes; huge numbers must not reach int32.
        inside = (x > -1) & (x < size)
        x = x.clamp(-1, size)
        near = x.floor()
        fraction = x - near
        near_ok = (near >= 0) & inside
        far_ok = (near < size - 1) & inside
        return cls(
            # The cast comes before the clamp: a NaN becomes some integer, which the clamp bounds.
            near.int().clamp(0, size - 1),
            near.int().add_(1).clamp_(0, size - 1),
            (1 - fraction) * near_ok,
            fraction * far_ok,
            near_ok * -float(size),
            far_ok * float(size),
        )


class _Points(NamedTuple):
    """Pixels that every point reads, its corners (near, near), (near, far), … in (y, x)."""

    rows: Tensor  # (L, 4, B, Q, H, P) row of `value` seen as (B·S·H, d)
    weights: Tensor  # (L, 4, B, Q, H, P) bilinear, without the attention weight
    axes: list[tuple[_Axis, _Axis]]  # per level: y, x


def _points(value: Tensor, levels: Sequence[int], locations: Tensor) -> _Points:
    batch, tokens, heads, _ = value.shape
    most = max(value[..., 0].numel(), 4 * locations[..., 0].numel())
    dtype = torch.int32 if most < 2**31 else torch.int64
    index: dict[str, Any] = {'dtype': dtype, 'device': value.device}
    base = torch.arange(batch, **index).view(-1, 1, 1, 1) * (tokens * heads)
    base = base + torch.arange(heads, **index).view(-1, 1)
    rows, weights, axes, start = [], [], [], 0
    for level, (h, w) in enumerate(zip(levels[::2], levels[1::2], strict=True)):
        y = _Axis.of(locations[:, :, :, level, :, 1], h)
        x = _Axis.of(locations[:, :, :, level, :, 0], w)
        for i, j in itertools.product(range(2), range(2)):
            line = (y[i].to(dtype) * w + start) * heads + base
            rows.append(torch.add(line, x[j], alpha=heads))
            weights.append(y[2 + i] * x[2 + j])
        axes.append((y, x))
        start += h * w
    shape = (len(axes), 4)
    return _Points(
        torch.stack(rows).unflatten(0, shape), torch.stack(weights).unflatten(0, shape), axes
    )


def _bag(table: Tensor, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(rows, table, offsets, mode='sum', per_sample_weights=weights)


def _by_level(attention_weights: Tensor) -> Tensor:
    """`(B, Q, H, L, P)` as `(L, 1, B, Q, H, P)`."""
    return attention_weights.movedim(3, 0).unsqueeze(1).contiguous()


def check_levels(value: Tensor, levels: Sequence[int]) -> None:
    """Raises ValueError unless the `levels` (h, w, h, w, …) fill `value` `(B, S, …)`."""
    if min(levels) < 1:
        raise ValueError(
            f'deform_attn: a level of spatial_shapes is (h, w) with h, w ≥ 1, got {list(levels)}'
        )
    pixels = sum(h * w for h, w in zip(levels[::2], levels[1::2], strict=True))
    if value.shape[1] != pixels:
        raise ValueError(
            f'deform_attn: value has S = {value.shape[1]} pixels, but the {len(levels) // 2} '
            f'levels of spatial_shapes add up to {pixels}'
        )


def _on_host(value: Tensor, levels: Sequence[int], shapes: Tensor | None) -> Sequence[int]:
    """Sizes of the levels as numbers."""
    if shapes is not None:
        levels = shapes.flatten().tolist()
        check_levels(value, levels)
    return levels


def primal(*args: Any) -> Tensor:
    """`forward` by gathering, which autograd differentiates any number of times."""
    value, levels, shapes, locations, weights = args
    levels = _on_host(value, levels, shapes)
    dtype = state_dtype(value.dtype)
    rows, bilinear, _ = _points(value, levels, locations.to(dtype))
    shares = bilinear * _by_level(weights.to(dtype))  # (L, 4, B, Q, H, P)
    pixels = value.to(dtype).flatten(0, 2)[rows.long()]
    out = (shares[..., None] * pixels).sum((0, 1, 5))
    return out.flatten(2).to(value.dtype)


@torch.no_grad()
def forward(args: Args, keep: bool = True) -> Tensor:
    """The sum over levels and points.

    Args:
        args: `value` `(B, S, H, d)`; h, w of every level, one after the other, or their
            `spatial_shapes` `(L, 2)`; `sampling_locations` `(B, Q, H, L, P, 2)`, x and y in [0, 1];
            `attention_weights` `(B, Q, H, L, P)`.
        keep: Nothing is kept for the backward pass.

    Returns:
        `(B, Q, H·d)`, dtype of `value`.
    """
    value, levels, shapes, locations, weights = args
    levels = _on_host(value, levels, shapes)
    dtype = state_dtype(value.dtype)
    batch, queries, heads, _, points, _ = locations.shape
    table = value.to(dtype).reshape(-1, value.shape[-1])
    rows, bilinear, _ = _points(value, levels, locations.to(dtype))
    bilinear *= _by_level(weights.to(dtype))
    offsets = torch.arange(0, rows.numel(), points, dtype=rows.dtype, device=value.device)
    # A bag is one corner of one level of one query's head.
    out = _bag(table, rows.view(-1), bilinear.view(-1), offsets)
    shape = (rows.shape[0] * rows.shape[1], batch, queries, heads * value.shape[-1])
    return out.view(shape).sum(0).to(value.dtype)


@torch.no_grad()
def backward(grads: Grads, args: Args, kept: Args) -> Grads:
    """Gradients of `forward`. Points exactly between two cells take the slope on their right.

    Returns:
        dvalue, None for the sizes, dlocations, dweights: contiguous, shape and dtype of each.
    """
    (do,), (value, levels, shapes, locations, weights) = grads, args
    levels = _on_host(value, levels, shapes)
    dtype, points = state_dtype(value.dtype), locations.shape[4]
    dim = value.shape[-1]
    table = value.to(dtype).reshape(-1, dim)
    do = do.to(dtype).reshape(-1, dim)
    rows, bilinear, axes = _points(value, levels, locations.to(dtype))
    attention = _by_level(weights.to(dtype))
    flat = rows.view(-1)
    # The query and head, b·Q·H + q·H + h, of every corner.
    reader = torch.arange(do.shape[0], dtype=flat.dtype, device=do.device)
    reader = reader.repeat_interleave(points).repeat(4 * len(axes))

    # dvalue: the same sum with rows and queries swapped.
    order = flat.sort(stable=True)[1]
    counts = torch.bincount(flat, minlength=table.shape[0])
    offsets = (counts.cumsum(0) - counts).to(flat.dtype)
    shares = (bilinear * attention).view(-1).index_select(0, order)
    dvalue = _bag(do, reader.index_select(0, order), shares, offsets)

    # Contribution of every corner's pixel: ⟨value, do⟩.
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        do, table, flat, offsets, reader, 0
    ).view_as(rows)
    dweights = (dots * bilinear).sum(1).movedim(0, 3).to(weights.dtype).contiguous()
    dots *= attention
    dlocations = torch.empty(locations.shape, dtype=locations.dtype, device=value.device)
    for level, (y, x) in enumerate(axes):
        d00, d01, d10, d11 = dots[level]
        dlocations[:, :, :, level, :, 0] = x.near_slope * (
            y.near_weight * d00 + y.far_weight * d10
        ) + x.far_slope * (y.near_weight * d01 + y.far_weight * d11)
        dlocations[:, :, :, level, :, 1] = y.near_slope * (
            x.near_weight * d00 + x.far_weight * d01
        ) + y.far_slope * (x.near_weight * d10 + x.far_weight * d11)
    return dvalue.view(value.shape).to(value.dtype), None, dlocations, dweights


def exported(*args: Any) -> Tensor:
    """`forward` in operators that exporters know: `grid_sample` for each level."""
    value, levels, shapes, locations, weights, _backend = args
    if shapes is not None:
        raise NotImplementedError(
            'deform_attn: spatial_shapes in a tensor cannot be exported; give a list of (h, w)'
        )
    wide = state_dtype(value.dtype)
    batch, _, heads, _ = value.shape
    weights = weights.to(wide).transpose(1, 2).flatten(0, 1).unsqueeze(1)  # (B·H, 1, Q, L, P)
    maps = value.to(wide).permute(0, 2, 3, 1).flatten(0, 1)  # (B·H, d, S)
    grids = (2 * locations.to(wide) - 1).transpose(1, 2).flatten(0, 1)  # (B·H, Q, L, P, 2)
    total, start = 0, 0
    for level in range(len(levels) // 2):
        h, w = levels[2 * level : 2 * level + 2]
        pixels = maps[..., start : start + h * w].unflatten(-1, (h, w))
        samples = F.grid_sample(pixels, grids[:, :, level], align_corners=False)
        total = total + (samples * weights[..., level, :]).sum(-1)
        start += h * w
    return total.unflatten(0, (batch, heads)).flatten(1, 2).mT.contiguous().to(value.dtype)
