"""Multi-scale deformable attention, the ViT-Adapter's (Deformable DETR, Eq. 3), as an op."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _backend, _inputs
from .._op import Args, Op
from . import reference

_NAME = 'deform_attn'
Shapes = Sequence[tuple[int, int]] | Tensor


def deform_attn(
    value: Tensor,
    spatial_shapes: Shapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Weighted sum of L·P bilinear samples of a feature pyramid for every query.

    B images, S = Σ h·w pixels of L levels, H heads of d channels, Q queries, P points a level.
    Pixel centres are at ((x + ½)/w, (y + ½)/h) (align_corners=False). A level is zero outside.

    Args:
        value: `(B, S, H, d)`, the levels one after the other, each row by row; fp32, bf16, fp16
            or fp64.
        spatial_shapes: (h, w) of every level: python ints, or an integer tensor `(L, 2)` on the
            device of `value`, as mmcv passes it. The host does not read a tensor on a GPU: a level
            that ends beyond S counts as zeros there, and is an error elsewhere.
        sampling_locations: `(B, Q, H, L, P, 2)`, (x, y) normalised to [0, 1] over the level; fp32,
            or the dtype of `value`. Points may lie outside.
        attention_weights: `(B, Q, H, L, P)`, fp32 or the dtype of `value`; used as given, without a
            softmax.
        backend: 'triton', 'numba' or 'reference' forces one (see `ttt_kernels`).

    Positions, weights and sums are computed in fp32 (fp64 for fp64). Autocast casts `value` but not
    the locations: half precision cannot resolve neighbouring pixels of a large image. The same
    inputs give the same bits, gradients too.

    Returns:
        `(B, Q, H·d)`, contiguous, dtype of `value`.
    """
    tensor = isinstance(spatial_shapes, Tensor)
    sizes, shapes = ((), spatial_shapes) if tensor else (_flatten(spatial_shapes), None)
    return OP(value, sizes, shapes, sampling_locations, attention_weights, backend=backend)[0]


def gradients(
    do: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `deform_attn`, for callers with their own autograd function, such as mmcv's.

    Args:
        do: `(B, Q, H·d)`, the gradient of the output.

    Returns:
        Gradients of `value`, `sampling_locations` and `attention_weights`.
    """
    tensors, backend = (sampling_locations, attention_weights), _backend.resolve(_NAME, None)
    needs = [True, False, True, True]
    dvalue, _, *dtensors = OP.registered_backward(
        do, value, spatial_shapes, *tensors, [], backend, needs
    )
    return dvalue, *dtensors


def _flatten(spatial_shapes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    if not isinstance(spatial_shapes, tuple | list):
        raise TypeError(f'{_NAME}: spatial_shapes={spatial_shapes!r}: give a list of (h, w).')
    if len(spatial_shapes) == 0:
        raise ValueError(f'{_NAME}: spatial_shapes={spatial_shapes!r}: give one level or more.')
    for level in spatial_shapes:
        if not isinstance(level, tuple | list) or [
            isinstance(x, int | torch.SymInt) and not isinstance(x, bool) for x in level
        ] != [True, True]:
            raise ValueError(
                f'{_NAME}: spatial_shapes has the level {level!r}: give two integers (h, w).'
            )
    return tuple(size for level in spatial_shapes for size in level)


def _check(*args: Any) -> Args:
    value, levels, shapes, locations, weights = args
    sizes = _inputs.sizes_of(_NAME, 'value', value, '(B, S, H, d)', 'Hd')
    if shapes is None:
        reference.check_levels(value, levels)
    else:
        _check_shapes(shapes)
    shape = '(B, Q, H, L, P, 2)'
    points = _inputs.sizes_of(_NAME, 'sampling_locations', locations, shape, 'P')
    count = len(levels) // 2 if shapes is None else shapes.shape[0]
    sizes |= {'Q': points['Q'], 'L': count, 'P': points['P'], '2': 2}
    wide = _inputs.state_dtype(value.dtype)
    for name, x, meaning in (
        ('sampling_locations', locations, shape),
        ('attention_weights', weights, '(B, Q, H, L, P)'),
    ):
        _inputs.check_shape(_NAME, name, x, meaning, sizes)
        if x.dtype not in (value.dtype, wide):
            raise TypeError(
                f'{_NAME}: {name} must be {wide} or the dtype of value ({value.dtype}), got '
                f'{x.dtype}; convert it'
            )
    return args


def _check_shapes(shapes: Tensor) -> None:
    if shapes.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f'{_NAME}: spatial_shapes must be of torch.int64 or torch.int32, got {shapes.dtype}'
        )
    if shapes.dim() != 2 or shapes.shape[0] == 0 or shapes.shape[1] != 2:
        raise ValueError(
            f'{_NAME}: spatial_shapes must have shape (L, 2) with L ≥ 1, got {tuple(shapes.shape)}'
        )


def _fake(args: Args, keep: bool) -> tuple[Tensor]:
    value, locations = args.value, args.sampling_locations
    batch, _, heads, dim = value.shape
    return (value.new_empty((batch, locations.shape[1], heads * dim)),)


def _flops(value: Any, levels: Any, shapes: Any, locations: Any, *_: Any) -> int:
    """Four multiply-accumulates per point and channel, 2 FLOPs each."""
    return 2 * 4 * math.prod(locations[:-1]) * value[-1]


OP = Op(
    _NAME,
    'Tensor value, SymInt[] levels, Tensor? spatial_shapes, Tensor sampling_locations, '
    'Tensor attention_weights',
    reference,
    reference.primal,
    _check,
    _fake,
    # Backward: once for `value`, once for the weights and locations.
    (_flops, lambda *args: 2 * _flops(*args)),
    tokens=('value',),
    typical={'sampling_locations': (0.5, 0.3), 'attention_weights': (0.1, 0.05)},
    images=('value', 'sampling_locations', 'attention_weights'),
)
