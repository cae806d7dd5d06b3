"""Multi-scale deformable attention, the ViT-Adapter's (Deformable DETR, Eq. 3), as an op."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
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
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Positions, weights and sums are computed in fp32 (fp64 for fp64). Autocast casts `value` but not
    the locations: half precision cannot resolve neighbouring pixels of a large image. The same
    inputs give the same bits, gradients too.

    Returns:
        `(B, Q, H·d)`, contiguous, dtype of `value`.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, levels that do not add up to S, mixed devices, unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(
        _NAME,
        value=value,
        sampling_locations=sampling_locations,
        attention_weights=attention_weights,
    )
    return _call(
        value,
        spatial_shapes,
        None,
        ('sampling_locations', sampling_locations),
        ('attention_weights', attention_weights),
        backend,
    )


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

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, levels that do not add up to S, mixed devices, unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(
        _NAME,
        value=value,
        reference_points=reference_points,
        sampling_offsets=sampling_offsets,
        attention_logits=attention_logits,
    )
    return _call(
        value,
        spatial_shapes,
        reference_points,
        ('sampling_offsets', sampling_offsets),
        ('attention_logits', attention_logits),
        backend,
    )


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
    _, *found = _backward_op(
        do,
        None,
        value,
        [],
        spatial_shapes,
        None,
        sampling_locations,
        attention_weights,
        False,
        _backend.resolve(_NAME, None),
    )
    return tuple(found)


def _call(
    value: Tensor,
    spatial_shapes: Shapes,
    reference_points: Tensor | None,
    places: tuple[str, Tensor],
    weights: tuple[str, Tensor],
    backend: str,
) -> Tensor:
    (value,) = _inputs.to_autocast(value)
    if value.dim() != 4:
        raise ValueError(
            f'{_NAME}: value must have shape (B, S, H, d), got {value.dim()} dimensions: '
            f'{tuple(value.shape)}'
        )
    levels, shapes = None, []
    if isinstance(spatial_shapes, Tensor):
        levels = _check_tensor_of_shapes(value, spatial_shapes)
    else:
        shapes = _flatten(spatial_shapes)
        reference.check_levels(value, shapes)
    num_levels = len(shapes) // 2 if levels is None else levels.shape[0]
    _check(value, num_levels, reference_points, places, weights)
    inputs = (value, places[1], weights[1], reference_points)
    if _inputs.transformed(*inputs):
        sizes = _on_host(value, shapes, levels)
        return _inputs.by_definition(reference.primal, *inputs, sizes)
    return _op(value, shapes, levels, reference_points, places[1], weights[1], backend)


def _check_tensor_of_shapes(value: Tensor, levels: Tensor) -> Tensor:
    _inputs.check_tensors(_NAME, value=value, spatial_shapes=levels)
    if levels.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f'{_NAME}: spatial_shapes must be of torch.int64 or torch.int32, got {levels.dtype}'
        )
    if levels.dim() != 2 or levels.shape[0] == 0 or levels.shape[1] != 2:
        raise ValueError(
            f'{_NAME}: spatial_shapes must have shape (L, 2) with L ≥ 1, got {tuple(levels.shape)}'
        )
    return levels


def _flatten(spatial_shapes: Sequence[tuple[int, int]]) -> list[int]:
    if not isinstance(spatial_shapes, tuple | list):
        raise TypeError(f'{_NAME}: spatial_shapes must be a list of (h, w), got {spatial_shapes!r}')
    if len(spatial_shapes) == 0:
        raise ValueError(f'{_NAME}: spatial_shapes must name at least one level, got none')
    for level in spatial_shapes:
        ints = isinstance(level, tuple | list) and all(
            isinstance(x, int | torch.SymInt) and not isinstance(x, bool) for x in level
        )
        if not ints or len(level) != 2 or min(level) < 1:
            raise ValueError(
                f'{_NAME}: a level of spatial_shapes is (h, w) with h, w ≥ 1, got {level!r}'
            )
    return [size for level in spatial_shapes for size in level]


def _check(
    value: Tensor,
    levels: int,
    reference_points: Tensor | None,
    places: tuple[str, Tensor],
    weights: tuple[str, Tensor],
) -> None:
    wide = _inputs.state_dtype(value.dtype)
    if value.dtype not in _inputs.FLOATS:
        raise TypeError(
            f'{_NAME}: value must be float32, bfloat16, float16 or float64, got {value.dtype}'
        )
    name, x = places
    if x.dim() != 6:
        raise ValueError(
            f'{_NAME}: {name} must have shape (B, Q, H, L, P, 2), got {x.dim()} dimensions: '
            f'{tuple(x.shape)}'
        )
    batch, _, heads, dim = value.shape
    queries, points = x.shape[1], x.shape[4]
    _inputs.check_not_empty(_NAME, 'value', value, H=heads, d=dim)
    _inputs.check_not_empty(_NAME, name, x, P=points)
    shape = (batch, queries, heads, levels, points)
    _inputs.check_shape(_NAME, name, x, (*shape, 2), '(B, Q, H, L, P, 2)')
    _inputs.check_shape(_NAME, weights[0], weights[1], shape, '(B, Q, H, L, P)')
    for name, x in (places, weights):
        if x.dtype not in (value.dtype, wide):
            raise TypeError(
                f'{_NAME}: {name} must be {wide} or the dtype of value ({value.dtype}), got '
                f'{x.dtype}; convert it'
            )
    if reference_points is not None:
        x = reference_points
        if tuple(x.shape) not in ((batch, queries, levels, 2), (1, queries, levels, 2)):
            raise ValueError(
                f'{_NAME}: reference_points must have shape (B or 1, Q, L, 2) = '
                f'{(batch, queries, levels, 2)}, got {tuple(x.shape)}'
            )
        _inputs.check_dtype(_NAME, 'reference_points', x, wide, 'for positions in large maps')


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::deform_attn', mutates_args=())
def _op(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    backend: str,
) -> Tensor:
    inputs = (value, shapes, levels, reference_points, places, weights)
    kernel = _choose(backend, *inputs)
    if kernel is not None:
        return kernel.forward(*inputs)
    sizes = _on_host(value, shapes, levels)
    return reference.forward(value, sizes, reference_points, places, weights)


@torch.library.custom_op('ttt_kernels::deform_attn_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    out: Tensor | None,
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    move: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (value, shapes, levels, reference_points, places, weights)
    kernel = _choose(backend, *inputs)
    if kernel is not None:
        return kernel.backward(do, out, *inputs, move)
    sizes = _on_host(value, shapes, levels)
    return reference.backward(do, value, sizes, reference_points, places, weights, move)


def _choose(backend: str, value: Tensor, *rest):
    return _backend.choose(
        _NAME, backend, value, lambda kernel: kernel.unsupported_reason(value, *rest)
    )


def _on_host(value: Tensor, shapes: Sequence[int], levels: Tensor | None) -> Sequence[int]:
    """Sizes of the levels as numbers, which the reference needs."""
    if levels is not None:
        shapes = levels.flatten().tolist()
        reference.check_levels(value, shapes)
    return shapes


@_op.register_fake
def _(value, shapes, levels, reference_points, places, weights, backend):
    batch, _, heads, dim = value.shape
    return value.new_empty((batch, places.shape[1], heads * dim))


@_backward_op.register_fake
def _(do, out, value, shapes, levels, reference_points, places, weights, move, backend):
    moved = value.new_empty(0) if not move else reference_points.new_empty(reference_points.shape)
    return moved, *(x.new_empty(x.shape) for x in (value, places, weights))


def _setup_context(ctx, inputs, output):
    value, ctx.shapes, levels, reference_points, places, weights, ctx.backend = inputs
    # The softmax's gradient needs the output.
    out = None if reference_points is None else output
    ctx.save_for_backward(out, value, levels, reference_points, places, weights)


def _backward(ctx, do):
    out, value, levels, reference_points, places, weights = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradients will be differentiated
        dvalue, dplaces, dweights, dreference = _inputs.gradients_of(
            reference.primal,
            do,
            (value, places, weights, reference_points),
            _on_host(value, ctx.shapes, levels),
        )
        return dvalue, None, None, dreference, dplaces, dweights, None
    move = ctx.needs_input_grad[3]
    dreference, dvalue, dplaces, dweights = _backward_op(
        do, out, value, ctx.shapes, levels, reference_points, places, weights, move, ctx.backend
    )
    return dvalue, None, None, dreference if move else None, dplaces, dweights, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.deform_attn)
def _forward_flops(
    value_shape,
    shapes,
    levels_shape,
    reference_shape,
    places_shape,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    """Four multiply-accumulates per point and channel, 2 FLOPs each."""
    batch, queries, heads, levels, points, _ = places_shape
    return 2 * 4 * batch * queries * heads * levels * points * value_shape[-1]


@register_flop_formula(torch.ops.ttt_kernels.deform_attn_backward)
def _backward_flops(do_shape, saved_shape, *args, **kwargs) -> int:
    """Twice the forward's: once for `value`, once for the weights and locations."""
    return 2 * _forward_flops(*args)
