"""The gradient of RoIAlign on a CPU (He et al. 2017, Sec. 3) by deformable attention.

A bin is a query and its samples are the query's points. torchvision's own is scalar and
single-threaded, and took a sixth of a step of the demo. On two threads this takes a quarter of that
time.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Channels of a head, the unit of work for threads.
_HEAD = 16


def roi_align_gradient(
    grad_output: Tensor,
    rois: Tensor,
    shape: torch.Size,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Gradient of the maps, of `shape` `(N, C, H, W)`.

    Args:
        grad_output: `(K, C, h, w)`, fp32 or fp64 like `rois`.
        rois: `(K, 5)`: image, x1, y1, x2, y2.
        shape: Shape of the maps.
        spatial_scale: Cells of a map in a pixel of the boxes.
        sampling_ratio: Samples of a bin along each axis, at least 1.
        aligned: Whether a cell's centre is at ½ (else at 0, and boxes are at least a cell wide).
    """
    from ttt_kernels.deform_attn import gradients

    images, channels, height, width = shape
    bins = grad_output.shape[2:]
    heads = channels // _HEAD if channels % _HEAD == 0 else 1
    places, weights = _samples(rois, bins, (height, width), spatial_scale, sampling_ratio, aligned)
    # The gradient of a sum does not depend on the summed values.
    value = rois.new_zeros(1, height * width, heads, channels // heads)
    level = torch.tensor([[height, width]])
    result = rois.new_zeros(images, height, width, channels)
    for image in rois[:, 0].unique().long().tolist():
        mine = rois[:, 0] == image
        do = grad_output[mine].permute(0, 2, 3, 1).reshape(1, -1, channels)
        where = places[mine].flatten(0, 1)[None, :, None, None].expand(-1, -1, heads, -1, -1, -1)
        share = weights[mine].flatten(0, 1)[None, :, None, None].expand(-1, -1, heads, -1, -1)
        result[image] = gradients(do, value, level, where, share)[0].view(height, width, channels)
    return result.permute(0, 3, 1, 2)


def _samples(
    rois: Tensor,
    bins: torch.Size,
    cells: tuple[int, int],
    scale: float,
    ratio: int,
    aligned: bool,
) -> tuple[Tensor, Tensor]:
    """Positions `(K, h·w, s², 2)` of every bin's samples, (x, y) over the map, and weights."""
    start, end = (rois[:, i : i + 2] * scale - 0.5 * aligned for i in (1, 3))
    extent = end - start if aligned else (end - start).clamp(min=1)
    axes = []
    for i, (count, size) in enumerate(zip(reversed(bins), reversed(cells), strict=True)):
        steps = (torch.arange(count * ratio, dtype=rois.dtype) + 0.5) / (count * ratio)
        x = start[:, i, None] + extent[:, i, None] * steps
        # Up to a cell outside the map a sample reads its border; farther out it is 0.
        inside = (x >= -1) & (x <= size)
        place = (x.clamp(0, size - 1) + 0.5) / size
        axes.append((place.unflatten(1, (count, ratio)), inside.unflatten(1, (count, ratio))))
    (x, in_x), (y, in_y) = axes
    # (K, h, w, s, s)
    x, in_x = x[:, None, :, None, :], in_x[:, None, :, None, :]
    y, in_y = y[:, :, None, :, None], in_y[:, :, None, :, None]
    weights = (in_x & in_y).to(rois.dtype) / ratio**2
    places = torch.stack([x.expand(weights.shape), y.expand(weights.shape)], -1)
    return places.flatten(3, 4).flatten(1, 2), weights.flatten(3, 4).flatten(1, 2)
