"""Multi-scale deformable attention, the ViT-Adapter's (Deformable DETR, Eq. 3), as an op."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference

_NAME = 'deform_attn'


def deform_attn(
    value: Tensor,
    spatial_shapes: Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Every query adds up L·P bilinear samples of a feature pyramid, with its own weights.

    B images, S = Σ h·w pixels of L levels, H heads of d channels, Q queries, P points a level.
    Pixel centres stand at ((x + ½)/w, (y + ½)/h) (align_corners=False); outside a level are zeros.

    Args:
        value: `(B, S, H, d)`, the levels one after the other, each row by row; fp32, bf16, fp16
            or fp64.
        spatial_shapes: (h, w) of every level, python ints.
        sampling_locations: `(B, Q, H, L, P, 2)`, (x, y) normalised to [0, 1] over the level; fp32,
            or the dtype of `value`. Points may lie outside.
        attention_weights: `(B, Q, H, L, P)`, fp32 or the dtype of `value`; used as they are, a
            softmax is the caller's.
        backend: None takes the Triton kernel on a GPU where it can run and the reference elsewhere;
            'triton' or 'reference' forces one.

    Positions, weights and sums are computed in fp32 (fp64 for fp64). Under autocast `value` goes to
    the autocast dtype; the locations stay as they are, because half precision cannot tell
    neighbouring pixels of a large image apart.

    Returns:
        `(B, Q, H·d)`, contiguous, dtype of `value`.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, levels that do not add up to S, mixed devices, unknown backend.
        RuntimeError: `backend='triton'` where the kernel cannot run.
    """
    backend = _backend.resolve(backend)
    _inputs.check_tensors(
        _NAME,
        value=value,
        sampling_locations=sampling_locations,
        attention_weights=attention_weights,
    )
    (value,) = _inputs.to_autocast(value)
    shapes = _flatten(spatial_shapes)
    _check(value, shapes, sampling_locations, attention_weights)
    return _op(value, shapes, sampling_locations, attention_weights, backend)


def _flatten(spatial_shapes: Sequence[tuple[int, int]]) -> list[int]:
    if isinstance(spatial_shapes, Tensor):
        raise TypeError(
            f'{_NAME}: spatial_shapes must be a sequence of (h, w) python ints, got a tensor; the '
            'sizes are known on the host, use [(h, w), …]'
        )
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


def _check(value: Tensor, shapes: list[int], locations: Tensor, weights: Tensor) -> None:
    if value.dim() != 4:
        raise ValueError(
            f'{_NAME}: value must have shape (B, S, H, d), got {value.dim()} dimensions: '
            f'{tuple(value.shape)}'
        )
    if locations.dim() != 6:
        raise ValueError(
            f'{_NAME}: sampling_locations must have shape (B, Q, H, L, P, 2), got '
            f'{locations.dim()} dimensions: {tuple(locations.shape)}'
        )
    batch, tokens, heads, dim = value.shape
    levels, pixels = len(shapes) // 2, sum(h * w for h, w in zip(*[iter(shapes)] * 2, strict=True))
    if tokens != pixels:
        raise ValueError(
            f'{_NAME}: value has S = {tokens} pixels, but the {levels} levels of spatial_shapes '
            f'add up to {pixels}'
        )
    queries, points = locations.shape[1], locations.shape[4]
    _inputs.check_not_empty(_NAME, 'value', value, H=heads, d=dim)
    _inputs.check_not_empty(_NAME, 'sampling_locations', locations, P=points)
    _inputs.check_shape(
        _NAME,
        'sampling_locations',
        locations,
        (batch, queries, heads, levels, points, 2),
        '(B, Q, H, L, P, 2)',
    )
    _inputs.check_shape(
        _NAME,
        'attention_weights',
        weights,
        (batch, queries, heads, levels, points),
        '(B, Q, H, L, P)',
    )
    if value.dtype not in _inputs.FLOATS:
        raise TypeError(
            f'{_NAME}: value must be float32, bfloat16, float16 or float64, got {value.dtype}'
        )
    for name, x in (('sampling_locations', locations), ('attention_weights', weights)):
        if x.dtype not in (value.dtype, reference.sum_dtype(value.dtype)):
            raise TypeError(
                f'{_NAME}: {name} must be {reference.sum_dtype(value.dtype)} or the dtype of value '
                f'({value.dtype}), got {x.dtype}; convert it'
            )


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::deform_attn', mutates_args=())
def _op(
    value: Tensor,
    shapes: Sequence[int],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    backend: str,
) -> Tensor:
    inputs = (value, shapes, sampling_locations, attention_weights)
    kernel = _choose(backend, *inputs)
    if kernel is not None:
        return kernel.forward(*inputs)
    return reference.forward(*inputs)


@torch.library.custom_op('ttt_kernels::deform_attn_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    value: Tensor,
    shapes: Sequence[int],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (value, shapes, sampling_locations, attention_weights)
    kernel = _choose(backend, *inputs)
    if kernel is not None:
        # The gradient of a sum comes as a view of one number, with stride 0.
        return kernel.backward(do.contiguous(), *inputs)
    return reference.backward(do, *inputs)


def _choose(backend: str, value: Tensor, *rest):
    return _backend.choose(_NAME, backend, value, lambda kernel: kernel.supported(value, *rest))


@_op.register_fake
def _(value, shapes, sampling_locations, attention_weights, backend):
    batch, _, heads, dim = value.shape
    return value.new_empty((batch, sampling_locations.shape[1], heads * dim))


@_backward_op.register_fake
def _(do, value, shapes, sampling_locations, attention_weights, backend):
    return tuple(x.new_empty(x.shape) for x in (value, sampling_locations, attention_weights))


def _setup_context(ctx, inputs, output):
    value, ctx.shapes, sampling_locations, attention_weights, ctx.backend = inputs
    ctx.save_for_backward(value, sampling_locations, attention_weights)


def _backward(ctx, do):
    value, sampling_locations, attention_weights = ctx.saved_tensors
    dvalue, dlocations, dweights = _backward_op(
        do, value, ctx.shapes, sampling_locations, attention_weights, ctx.backend
    )
    return dvalue, None, dlocations, dweights, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.deform_attn)
def _forward_flops(value_shape, shapes, locations_shape, *args, out_shape=None, **kwargs) -> int:
    """Four multiply-accumulates per point and channel, 2 FLOPs each."""
    batch, queries, heads, levels, points, _ = locations_shape
    return 2 * 4 * batch * queries * heads * levels * points * value_shape[-1]


@register_flop_formula(torch.ops.ttt_kernels.deform_attn_backward)
def _backward_flops(do_shape, value_shape, shapes, locations_shape, *args, **kwargs) -> int:
    """Twice the forward's: once for `value`, once for the weights and locations."""
    return 2 * _forward_flops(value_shape, shapes, locations_shape)
