"""Deformable attention on a CPU, compiled by numba, one head of one image at a time.

A program is one head of one image: it goes through the queries in order and has its own part of
    every result, the gradient of the values included. So the gradient is a plain scatter, and
    results do not depend on the number or order of threads.

bf16 and fp16 are computed in fp32. Pixels outside a level are read from its border with the weight
0, as in the reference.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .._inputs import state_dtype
from .._numba import inlined, jit, parallel
from . import reference as definition

# ------------------------------------------------------------------------------------------- parts


@inlined
def _softmax(a, logits):
    peak = logits[0]
    for i in range(logits.shape[0]):
        peak = max(peak, logits[i])
    total = logits[0] * 0
    for i in range(logits.shape[0]):
        a[i] = np.exp(logits[i] - peak)
        total += a[i]
    for i in range(logits.shape[0]):
        a[i] /= total


@inlined
def _axis(x, size, zero):
    """Both neighbours of x among `size` pixels, weights (0 outside), and if they are inside."""
    if not (x > -1 and x < size):
        # Huge numbers and NaN must not become integers. NaN makes the weights NaN.
        nothing = x if x != x else zero
        return 0, 0, nothing, nothing, False, False
    near = int(np.floor(x))
    fraction = x - near
    near_ok, far_ok = near >= 0, near + 1 < size
    return (
        near if near_ok else 0,
        near + 1 if far_ok else near,
        1 - fraction if near_ok else zero,
        fraction if far_ok else zero,
        near_ok,
        far_ok,
    )


# ----------------------------------------------------------------------------------------- kernels


@jit
def _forward(first, last, value, shapes, centres, places, weights, out, sizes, fused):
    heads, pixels, queries = sizes
    levels, points = places.shape[1], places.shape[2]
    a = np.empty(levels * points, value.dtype)
    half = value.dtype.type(0.5)
    zero = value.dtype.type(0)
    for program in range(first, last):
        image, head = program // heads, program % heads
        for query in range(queries):
            row = (image * queries + query) * heads + head
            if fused:
                _softmax(a, weights[row])
            else:
                a[:] = weights[row]
            sums = out[row]
            sums[:] = 0
            start = image * pixels
            for level in range(levels):
                height, width = shapes[level, 0], shapes[level, 1]
                for p in range(points):
                    x, y = places[row, level, p, 0], places[row, level, p, 1]
                    if fused:
                        centre = centres[image % centres.shape[0], query, level]
                        x += centre[0] * width
                        y += centre[1] * height
                    else:
                        x *= width
                        y *= height
                    x0, x1, wx0, wx1, _, _ = _axis(x - half, width, zero)
                    y0, y1, wy0, wy1, _, _ = _axis(y - half, height, zero)
                    weight = a[level * points + p]
                    w00, w01 = weight * wy0 * wx0, weight * wy0 * wx1
                    w10, w11 = weight * wy1 * wx0, weight * wy1 * wx1
                    v00 = value[(start + y0 * width + x0) * heads + head]
                    v01 = value[(start + y0 * width + x1) * heads + head]
                    v10 = value[(start + y1 * width + x0) * heads + head]
                    v11 = value[(start + y1 * width + x1) * heads + head]
                    for c in range(sums.shape[0]):
                        sums[c] += (w00 * v00[c] + w01 * v01[c]) + (w10 * v10[c] + w11 * v11[c])
                start += height * width


@inlined
def _add(out, weight, x):
    if weight != 0:
        for c in range(x.shape[0]):
            out[c] += weight * x[c]


@jit
def _backward(
    first,
    last,
    do,
    value,
    shapes,
    centres,
    places,
    weights,
    dvalue,
    dplaces,
    dweights,
    sizes,
    fused,
):
    heads, pixels, queries = sizes
    levels, points = places.shape[1], places.shape[2]
    a = np.empty(levels * points, value.dtype)
    half = value.dtype.type(0.5)
    zero = value.dtype.type(0)
    for program in range(first, last):
        image, head = program // heads, program % heads
        for s in range(image * pixels, (image + 1) * pixels):
            dvalue[s * heads + head] = 0
        for query in range(queries):
            row = (image * queries + query) * heads + head
            if fused:
                _softmax(a, weights[row])
            else:
                a[:] = weights[row]
            g = do[row]
            mean = zero
            start = image * pixels
            for level in range(levels):
                height, width = shapes[level, 0], shapes[level, 1]
                for p in range(points):
                    x, y = places[row, level, p, 0], places[row, level, p, 1]
                    if fused:
                        centre = centres[image % centres.shape[0], query, level]
                        x += centre[0] * width
                        y += centre[1] * height
                    else:
                        x *= width
                        y *= height
                    x0, x1, wx0, wx1, has_x0, has_x1 = _axis(x - half, width, zero)
                    y0, y1, wy0, wy1, has_y0, has_y1 = _axis(y - half, height, zero)
                    weight = a[level * points + p]
                    r00 = (start + y0 * width + x0) * heads + head
                    r01 = (start + y0 * width + x1) * heads + head
                    r10 = (start + y1 * width + x0) * heads + head
                    r11 = (start + y1 * width + x1) * heads + head
                    v00, v01, v10, v11 = value[r00], value[r01], value[r10], value[r11]
                    d00 = d01 = d10 = d11 = zero
                    for c in range(g.shape[0]):
                        d00 += v00[c] * g[c]
                        d01 += v01[c] * g[c]
                        d10 += v10[c] * g[c]
                        d11 += v11[c] * g[c]
                    _add(dvalue[r00], weight * wy0 * wx0, g)
                    _add(dvalue[r01], weight * wy0 * wx1, g)
                    _add(dvalue[r10], weight * wy1 * wx0, g)
                    _add(dvalue[r11], weight * wy1 * wx1, g)
                    left = (wy0 * d00 + wy1 * d10) * has_x0
                    right = (wy0 * d01 + wy1 * d11) * has_x1
                    top = (wx0 * d00 + wx1 * d01) * has_y0
                    bottom = (wx0 * d10 + wx1 * d11) * has_y1
                    gx, gy = weight * (right - left), weight * (bottom - top)
                    if not fused:
                        gx *= width
                        gy *= height
                    dplaces[row, level, p, 0] = gx
                    dplaces[row, level, p, 1] = gy
                    da = wy0 * (wx0 * d00 + wx1 * d01) + wy1 * (wx0 * d10 + wx1 * d11)
                    dweights[row, level * points + p] = da
                    mean += weight * da
                start += height * width
            if fused:
                for i in range(a.shape[0]):
                    dweights[row, i] = a[i] * (dweights[row, i] - mean)


# -------------------------------------------------------------------------------------------- host


def unsupported_reason(*inputs: object) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    return None


def _arguments(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference: Tensor | None,
    places: Tensor,
    weights: Tensor,
) -> tuple:
    """Arrays of the inputs in one dtype: rows of value, sizes, centres, places, weights."""
    if levels is not None:
        shapes = levels.flatten().tolist()
        definition.check_levels(value, shapes)
    dtype = state_dtype(value.dtype)
    points = places.shape[3:5]
    centres = value.new_zeros((1, 1, 1, 2)) if reference is None else reference
    arrays = (
        x.to(dtype).contiguous()
        for x in (
            value.reshape(-1, value.shape[-1]),
            centres,
            places.reshape(-1, *points, 2),
            weights.reshape(-1, points[0] * points[1]),
        )
    )
    rows, centres, places, weights = (x.detach().numpy() for x in arrays)
    return rows, np.array(shapes, np.int64).reshape(-1, 2), centres, places, weights


def _work(value: Tensor, weights: Tensor) -> int:
    """Four corners for each sample, at a fifth of the speed of products."""
    return 20 * weights.numel() * value.shape[-1]


def forward(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference: Tensor | None,
    places: Tensor,
    weights: Tensor,
) -> Tensor:
    """O `(B, Q, H·d)`; arguments as for the Triton kernels."""
    batch, pixels, heads, dim = value.shape
    queries = places.shape[1]
    arrays = _arguments(value, shapes, levels, reference, places, weights)
    out = torch.empty((batch * queries * heads, dim), dtype=state_dtype(value.dtype))
    sizes = (heads, pixels, queries)
    parallel(
        _forward,
        batch * heads,
        _work(value, weights),
        *arrays,
        out.numpy(),
        sizes,
        reference is not None,
    )
    return out.view(batch, queries, heads * dim).to(value.dtype)


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
) -> tuple[Tensor, ...]:
    """dreference (empty unless `move`), dvalue, dplaces, dweights, as from the Triton kernels."""
    batch, pixels, heads, dim = value.shape
    dtype = state_dtype(value.dtype)
    arrays = _arguments(value, shapes, levels, reference, places, weights)
    do = do.to(dtype).reshape(-1, dim).contiguous()
    dvalue, dplaces, dweights = (
        torch.empty(x.shape, dtype=dtype) for x in (value, places, weights)
    )
    parallel(
        _backward,
        batch * heads,
        _work(value, weights),
        do.numpy(),
        *arrays,
        dvalue.view(-1, dim).numpy(),
        dplaces.view(arrays[3].shape).numpy(),
        dweights.view(arrays[4].shape).numpy(),
        (heads, pixels, places.shape[1]),
        reference is not None,
    )
    dreference = value.new_empty(0)
    if move:
        widths = torch.from_numpy(arrays[1]).flip(-1)
        dreference = (dplaces.sum((2, 4)) * widths).sum_to_size(reference.shape)
    results = zip((dvalue, dplaces, dweights), (value, places, weights), strict=True)
    return dreference, *(x.to(like.dtype) for x, like in results)
