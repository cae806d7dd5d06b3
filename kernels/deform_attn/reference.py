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


def _points(value: Tensor, shapes: Sequence[int], locations: Tensor) -> _Points:
    batch, tokens, heads, _ = value.shape
    most = max(value[..., 0].numel(), 4 * locations[..., 0].numel())
    dtype = torch.int32 if most < 2**31 else torch.int64
    index: dict[str, Any] = {'dtype': dtype, 'device': value.device}
    base = torch.arange(batch, **index).view(-1, 1, 1, 1) * (tokens * heads)
    base = base + torch.arange(heads, **index).view(-1, 1)
    levels = len(shapes) // 2
    shape = (levels, 4, *locations.shape[:3], locations.shape[4])
    rows = torch.empty(shape, **index)
    weights = torch.empty(shape, dtype=locations.dtype, device=value.device)
    axes, start = [], 0
    for level in range(levels):
        h, w = shapes[2 * level : 2 * level + 2]
        y = _Axis.of(locations[:, :, :, level, :, 1], h)
        x = _Axis.of(locations[:, :, :, level, :, 0], w)
        for i in range(2):
            line = (y[i].to(base.dtype) * w + start) * heads + base
            for j in range(2):
                torch.add(line, x[j], alpha=heads, out=rows[level, 2 * i + j])
                torch.mul(y[2 + i], x[2 + j], out=weights[level, 2 * i + j])
        axes.append((y, x))
        start += h * w
    return _Points(rows, weights, axes)


def _bag(table: Tensor, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(rows, table, offsets, mode='sum', per_sample_weights=weights)


def _by_level(attention_weights: Tensor) -> Tensor:
    """`(B, Q, H, L, P)` as `(L, 1, B, Q, H, P)`."""
    return attention_weights.movedim(3, 0).unsqueeze(1).contiguous()


def check_levels(value: Tensor, shapes: Sequence[int]) -> None:
    """Raises ValueError unless the levels of `shapes` (h, w, h, w, …) fill `value` `(B, S, …)`."""
    if min(shapes) < 1:
        raise ValueError(
            f'deform_attn: a level of spatial_shapes is (h, w) with h, w ≥ 1, got {list(shapes)}'
        )
    pixels = sum(h * w for h, w in zip(shapes[::2], shapes[1::2], strict=True))
    if value.shape[1] != pixels:
        raise ValueError(
            f'deform_attn: value has S = {value.shape[1]} pixels, but the {len(shapes) // 2} '
            f'levels of spatial_shapes add up to {pixels}'
        )


def _sizes(shapes: Sequence[int], places: Tensor) -> Tensor:
    """`(L, 1, 2)`: width and height of every level, to broadcast with `places`."""
    sizes = torch.tensor(shapes, dtype=places.dtype, device=places.device)
    return sizes.view(-1, 1, 2).flip(-1)


def unfused(
    shapes: Sequence[int], reference_points: Tensor, offsets: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Locations and weights, in the dtype of `reference_points`, from offsets and logits."""
    offsets = offsets.to(reference_points.dtype)
    locations = reference_points[:, :, None, :, None] + offsets / _sizes(shapes, offsets)
    weights = logits.to(reference_points.dtype).flatten(-2).softmax(-1).view(logits.shape)
    return locations, weights


def primal(
    value: Tensor,
    places: Tensor,
    weights: Tensor,
    reference_points: Tensor | None,
    shapes: Sequence[int],
) -> Tensor:
    """The definition, by gathering; autograd differentiates it any number of times.

    Args as in `forward`.

    Returns:
        `(B, Q, H·d)`, dtype of `value`.
    """
    if reference_points is not None:
        places, weights = unfused(shapes, reference_points, places, weights)
    dtype = state_dtype(value.dtype)
    places, weights = places.to(dtype), weights.to(dtype)
    sizes = list(zip(shapes[::2], shapes[1::2], strict=True))
    maps = value.to(dtype).transpose(1, 2).split([h * w for h, w in sizes], dim=2)
    shares = []
    for level, (h, w) in enumerate(sizes):
        y = _Axis.of(places[:, :, :, level, :, 1], h)
        x = _Axis.of(places[:, :, :, level, :, 0], w)
        for i, j in itertools.product(range(2), range(2)):
            rows = (y[i] * w + x[j]).transpose(1, 2)  # (B, H, Q, P)
            share = (y[2 + i] * x[2 + j] * weights[:, :, :, level]).transpose(1, 2)
            index = rows.flatten(2).long()[..., None].expand(-1, -1, -1, value.shape[-1])
            read = maps[level].gather(2, index).unflatten(2, rows.shape[2:])
            shares.append((share[..., None] * read).sum(3))
    return sum(shares[1:], shares[0]).transpose(1, 2).flatten(2).to(value.dtype)


@torch.no_grad()
def forward(
    value: Tensor,
    shapes: Sequence[int],
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
) -> Tensor:
    """The sum over levels and points.

    Args:
        value: `(B, S, H, d)`.
        shapes: h, w of every level, one after the other.
        reference_points: None, or `(B or 1, Q, L, 2)`.
        places: `(B, Q, H, L, P, 2)`, x and y in [0, 1]; with `reference_points`, pixels from them.
        weights: `(B, Q, H, L, P)`; with `reference_points`, logits.

    Returns:
        `(B, Q, H·d)`, dtype of `value`.
    """
    if reference_points is not None:
        places, weights = unfused(shapes, reference_points, places, weights)
    dtype = state_dtype(value.dtype)
    batch, queries, heads, _, points, _ = places.shape
    table = value.to(dtype).reshape(-1, value.shape[-1])
    rows, bilinear, _ = _points(value, shapes, places.to(dtype))
    bilinear *= _by_level(weights.to(dtype))
    offsets = torch.arange(0, rows.numel(), points, dtype=rows.dtype, device=value.device)
    # A bag is one corner of one level of one query's head.
    out = _bag(table, rows.view(-1), bilinear.view(-1), offsets)
    shape = (rows.shape[0] * rows.shape[1], batch, queries, heads * value.shape[-1])
    return out.view(shape).sum(0).to(value.dtype)


@torch.no_grad()
def backward(
    do: Tensor,
    value: Tensor,
    shapes: Sequence[int],
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    move: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `forward`; points exactly between two cells take the slope on their right.

    Returns:
        dreference_points, empty unless `move`; dvalue, dplaces, dweights: contiguous, shape and
        dtype of each.
    """
    dreference = value.new_empty(0)
    if reference_points is None:
        dvalue, dplaces, dweights = _backward(do, value, shapes, places, weights)
    else:
        locations, attention = unfused(shapes, reference_points, places, weights)
        dvalue, dplaces, dweights = _backward(do, value, shapes, locations, attention)
        if move:
            dreference = dplaces.sum((2, 4)).sum_to_size(reference_points.shape)
        dplaces /= _sizes(shapes, dplaces)
        mean = (attention * dweights).sum((-2, -1), keepdim=True)
        dweights = attention * (dweights - mean)
    dweights = dweights.to(weights.dtype).contiguous()
    return dreference, dvalue, dplaces.to(places.dtype), dweights


def _backward(
    do: Tensor,
    value: Tensor,
    shapes: Sequence[int],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = state_dtype(value.dtype)
    levels, points = sampling_locations.shape[3:5]
    dim = value.shape[-1]
    table = value.to(dtype).reshape(-1, dim)
    do = do.to(dtype).reshape(-1, dim)
    rows, bilinear, axes = _points(value, shapes, sampling_locations.to(dtype))
    attention = _by_level(attention_weights.to(dtype))
    flat = rows.view(-1)
    # The query and head, b·Q·H + q·H + h, of every corner.
    reader = torch.arange(do.shape[0], dtype=flat.dtype, device=do.device)
    reader = reader.repeat_interleave(points).repeat(4 * levels)

    # dvalue: the same sum with rows and queries swapped.
    order = flat.sort(stable=True)[1]
    counts = torch.bincount(flat, minlength=table.shape[0])
    offsets = (counts.cumsum(0) - counts).to(flat.dtype)
    weights = (bilinear * attention).view(-1).index_select(0, order)
    dvalue = _bag(do, reader.index_select(0, order), weights, offsets)

    # Contribution of every corner's pixel: ⟨value, do⟩.
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        do, table, flat, offsets, reader, 0
    ).view_as(rows)
    dattention = (dots * bilinear).sum(1).movedim(0, 3)
    dots *= attention
    dlocations = torch.empty(sampling_locations.shape, dtype=dtype, device=value.device)
    for level, (y, x) in enumerate(axes):
        d00, d01, d10, d11 = dots[level]
        dlocations[:, :, :, level, :, 0] = x.near_slope * (
            y.near_weight * d00 + y.far_weight * d10
        ) + x.far_slope * (y.near_weight * d01 + y.far_weight * d11)
        dlocations[:, :, :, level, :, 1] = y.near_slope * (
            x.near_weight * d00 + x.far_weight * d01
        ) + y.far_slope * (x.near_weight * d10 + x.far_weight * d11)
    return dvalue.view(value.shape).to(value.dtype), dlocations, dattention


def exported(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    _backend: str,
) -> Tensor:
    """`forward` in operators that exporters know: `grid_sample` for each level."""
    if levels is not None:
        raise NotImplementedError('deform_attn: spatial_shapes in a tensor cannot be exported')
    wide = state_dtype(value.dtype)
    batch, _, heads, _ = value.shape
    places, weights = places.to(wide), weights.to(wide)
    if reference_points is not None:
        weights = weights.flatten(-2).softmax(-1).view(weights.shape)
    weights = weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)  # (B·H, 1, Q, L, P)
    maps = value.to(wide).permute(0, 2, 3, 1).flatten(0, 1)  # (B·H, d, S)
    total, start = 0, 0
    for level in range(len(shapes) // 2):
        h, w = shapes[2 * level : 2 * level + 2]
        x, y = places[:, :, :, level].unbind(-1)  # (B, Q, H, P)
        if reference_points is not None:
            centre = reference_points[:, :, level, :, None, None]
            x, y = centre[:, :, 0] + x / w, centre[:, :, 1] + y / h
        grid = (2 * torch.stack((x, y), -1) - 1).transpose(1, 2).flatten(0, 1)
        pixels = maps[..., start : start + h * w].unflatten(-1, (h, w))
        samples = F.grid_sample(pixels, grid, align_corners=False)
        total = total + (samples * weights[..., level, :]).sum(-1)
        start += h * w
    return total.unflatten(0, (batch, heads)).flatten(1, 2).mT.contiguous().to(value.dtype)
