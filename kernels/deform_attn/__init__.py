"""Multi-scale deformable attention, the ViT-Adapter's (Deformable DETR, Eq. 3), as an op."""

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _backend, _inputs
from .._op import Args, Grads, Op
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
    Pixel centres are at ((x + ½)/w, (y + ½)/h) (align_corners=False); a level is zero outside.

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
        backend: 'triton', 'numba' or 'reference' forces one; see `ttt_kernels`.

    Positions, weights and sums are computed in fp32 (fp64 for fp64). Autocast casts `value` but not
    the locations: half precision cannot resolve neighbouring pixels of a large image. The same
    inputs give the same bits, gradients too.

    Returns:
        `(B, Q, H·d)`, contiguous, dtype of `value`.
    """
    places, weights = sampling_locations, attention_weights
    return _call(value, spatial_shapes, None, places, weights, backend)


def deform_attn_fused(
    value: Tensor,
    spatial_shapes: Shapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """`deform_attn` of the outputs of a module's two linear layers, without intermediate tensors.

    The weights are the softmax of `attention_logits` over levels and points; the locations are
    `reference_points[:, :, None, :, None] + sampling_offsets / (w, h)`.

    Args:
        value: As in `deform_attn`.
        spatial_shapes: As in `deform_attn`.
        reference_points: `(B, Q, L, 2)`, or `(1, Q, L, 2)` for all images: (x, y) of every query,
            normalised to [0, 1] over each level; fp32 (fp64 with a `value` of fp64).
        sampling_offsets: `(B, Q, H, L, P, 2)`, (x, y) in pixels of the level; fp32 or the dtype of
            `value`.
        attention_logits: `(B, Q, H, L, P)`; fp32 or the dtype of `value`.
        backend: As in `deform_attn`.

    Returns:
        `(B, Q, H·d)`, contiguous, dtype of `value`.
    """
    if reference_points is None:
        raise TypeError(f'{_NAME}: reference_points must be a tensor, got NoneType')
    places, weights = sampling_offsets, attention_logits
    return _call(value, spatial_shapes, reference_points, places, weights, backend)


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
    points = (sampling_locations, attention_weights)
    backend, needs = _backend.resolve(_NAME, None), [True, False, False, True, True]
    # The output is needed for a softmax only.
    dvalue, _, _, *dpoints = OP.registered_backward(
        do, value, spatial_shapes, None, *points, do, [], backend, needs
    )
    return dvalue, *dpoints


def _call(
    value: Tensor,
    spatial_shapes: Shapes,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    backend: str | None,
) -> Tensor:
    tensor = isinstance(spatial_shapes, Tensor)
    shapes, levels = ((), spatial_shapes) if tensor else (_flatten(spatial_shapes), None)
    return OP(value, shapes, levels, reference_points, places, weights, backend=backend)[0]


def _flatten(spatial_shapes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    if not isinstance(spatial_shapes, tuple | list):
        raise TypeError(f'{_NAME}: spatial_shapes must be a list of (h, w), got {spatial_shapes!r}')
    if len(spatial_shapes) == 0:
        raise ValueError(f'{_NAME}: spatial_shapes must name at least one level, got none')
    for level in spatial_shapes:
        if not isinstance(level, tuple | list) or [
            isinstance(x, int | torch.SymInt) and not isinstance(x, bool) for x in level
        ] != [True, True]:
            raise ValueError(
                f'{_NAME}: a level of spatial_shapes is two ints (h, w), got {level!r}'
            )
    return tuple(size for level in spatial_shapes for size in level)


def _names(args: Args) -> tuple[str, ...]:
    """Names of the arguments in errors: `deform_attn_fused` has reference points."""
    fused = ('sampling_offsets', 'attention_logits')
    points = ('sampling_locations', 'attention_weights') if args[3] is None else fused
    return ('value', 'spatial_shapes', 'spatial_shapes', 'reference_points', *points)


def _check(*args: Any) -> Args:
    value, shapes, levels, reference_points, places, weights = args
    *_, places_name, weights_name = _names(args)
    sizes = _inputs.sizes_of(_NAME, 'value', value, '(B, S, H, d)', 'Hd')
    if levels is None:
        reference.check_levels(value, shapes)
    else:
        _check_levels(levels)
    points = _inputs.sizes_of(_NAME, places_name, places, '(B, Q, H, L, P, 2)', 'P')
    count = len(shapes) // 2 if levels is None else levels.shape[0]
    sizes |= {'Q': points['Q'], 'L': count, 'P': points['P'], '2': 2}
    wide = _inputs.state_dtype(value.dtype)
    for name, x, meaning in (
        (places_name, places, '(B, Q, H, L, P, 2)'),
        (weights_name, weights, '(B, Q, H, L, P)'),
    ):
        _inputs.check_shape(_NAME, name, x, meaning, sizes)
        if x.dtype not in (value.dtype, wide):
            raise TypeError(
                f'{_NAME}: {name} must be {wide} or the dtype of value ({value.dtype}), got '
                f'{x.dtype}; convert it'
            )
    if reference_points is not None:
        name, x = 'reference_points', reference_points
        sizes['B or 1'] = 1 if x.shape[:1] == (1,) else sizes['B']
        _inputs.check_shape(_NAME, name, x, '(B or 1, Q, L, 2)', sizes)
        _inputs.check_dtype(_NAME, name, x, wide, 'for positions in large maps')
    return args


def _check_levels(levels: Tensor) -> None:
    if levels.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f'{_NAME}: spatial_shapes must be of torch.int64 or torch.int32, got {levels.dtype}'
        )
    if levels.dim() != 2 or levels.shape[0] == 0 or levels.shape[1] != 2:
        raise ValueError(
            f'{_NAME}: spatial_shapes must have shape (L, 2) with L ≥ 1, got {tuple(levels.shape)}'
        )


def _on_host(value: Tensor, shapes: Sequence[int], levels: Tensor | None) -> Sequence[int]:
    """Sizes of the levels as numbers, which the reference needs."""
    if levels is not None:
        shapes = levels.flatten().tolist()
        reference.check_levels(value, shapes)
    return shapes


def _definition(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
) -> Tensor:
    sizes = _on_host(value, shapes, levels)
    return reference.primal(value, places, weights, reference_points, sizes)


def _fake(args: Args, keep: bool) -> tuple[Tensor]:
    value, places = args[0], args[4]
    batch, _, heads, dim = value.shape
    return (value.new_empty((batch, places.shape[1], heads * dim)),)


def _forward(module: ModuleType, args: Args, keep: bool) -> Tensor:
    if module is not reference:
        return module.forward(*args)
    value, shapes, levels, *points = args
    return reference.forward(value, _on_host(value, shapes, levels), *points)


def _backward(
    module: ModuleType, grads: Grads, args: Args, kept: Args, needs: Sequence[bool]
) -> Grads:
    value, shapes, levels, reference_points, places, weights = args
    move = needs[2]
    if module is reference:
        sizes = _on_host(value, shapes, levels)
        found = reference.backward(grads[0], value, sizes, reference_points, places, weights, move)
    else:
        # The softmax's gradient needs the output.
        out = None if reference_points is None else kept[0]
        found = module.backward(grads[0], out, *args, move)
    dreference, dvalue, *dpoints = found
    return dvalue, None, dreference, *dpoints


def _examples(new: Any) -> Iterator[Args]:
    shapes, queries = (7, 9, 4, 5), 70
    value, lead = new.tokens(2, 83, 2, 32), (2, queries, 2, 2, 4)
    yield value, shapes, None, None, new.uniform(*lead, 2), new.uniform(*lead)
    centres = new.uniform(1, queries, 2, 2)
    yield value, shapes, None, centres, new.normal(*lead, 2), new.normal(*lead)


def _flops(value: Any, shapes: Any, levels: Any, reference: Any, places: Any, *_: Any) -> int:
    """Four multiply-accumulates per point and channel, 2 FLOPs each."""
    return 2 * 4 * math.prod(places[:-1]) * value[-1]


OP = Op(
    _NAME,
    'Tensor value, SymInt[] shapes, Tensor? levels, Tensor? reference_points, Tensor places, '
    'Tensor weights',
    reference,
    _definition,
    _check,
    _fake,
    _backward,
    # Backward: once for `value`, once for the weights and locations.
    (_flops, lambda *args: 2 * _flops(*args)),
    tokens=('value',),
    saves_output=True,
    forward=_forward,
    examples=_examples,
    unsupported=lambda kernel, args: kernel.unsupported_reason(*args),
    public_names=_names,
)
