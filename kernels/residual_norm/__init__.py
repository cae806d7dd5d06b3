"""Residual sum and LayerNorm, in front of a mixer or a feed-forward, as an op."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference

_NAME = 'residual_norm'


def residual_norm(
    x: Tensor,
    branch: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y = x + branch, and LN(y) over the channels.

    B images, N tokens, C channels.

    Args:
        x: `(B, N, C)`, fp32, bf16, fp16 or fp64; any strides.
        branch: `(B, N, C)`, of any of these; any strides.
        ln_weight, ln_bias: `(C,)` fp32 (fp64 where x is fp64).
        eps: ε of the LayerNorm.
        dtype: of LN(y), which is made in fp32; None is the dtype of y. Autocast changes nothing.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Returns:
        y `(B, N, C)` in the dtype of x + branch, and LN(y); both contiguous.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, N or C = 0, mixed devices, an unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, x=x, branch=branch, ln_weight=ln_weight, ln_bias=ln_bias)
    _check(x, ln_weight, ln_bias, eps)
    _inputs.check_shape(_NAME, 'branch', branch, x.shape, 'as x has')
    _check_float('branch', branch.dtype)
    dtype = _norm_dtype(dtype, reference.sum_dtype(x, branch))
    args = (x, branch, None, None, ln_weight, ln_bias, 0, 0, float(eps), dtype)
    if _inputs.transformed(x, branch, ln_weight, ln_bias):
        return _inputs.by_definition(reference.primal, *args)
    return _op(*args, backend)


def conv_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    hw: tuple[int, int],
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y = x + conv(x) + bias, depth-wise 3×3 with zero padding, and LN(y): `residual_norm`.

    Args:
        x: `(B, h·w, C)`, pixels row by row.
        weight: `(C, 3, 3)` fp32 (fp64 where x is fp64).
        bias: `(C,)` in the dtype of the weight, or None.
        ln_weight, ln_bias, eps, dtype, backend: as `residual_norm`.
        hw: height and width of the map, python ints.

    Returns:
        y `(B, h·w, C)` in the dtype of x, and LN(y); both contiguous.

    Raises:
        TypeError, ValueError, RuntimeError: as `residual_norm`.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(
        _NAME,
        ('bias',),
        x=x,
        weight=weight,
        bias=bias,
        ln_weight=ln_weight,
        ln_bias=ln_bias,
    )
    _check(x, ln_weight, ln_bias, eps)
    h, w = _inputs.check_map(_NAME, 'x', x, hw)
    _inputs.check_conv(_NAME, weight, bias, x.shape[-1], x.dtype)
    dtype = _norm_dtype(dtype, x.dtype)
    args = (x, None, weight, bias, ln_weight, ln_bias, h, w, float(eps), dtype)
    if _inputs.transformed(x, weight, bias, ln_weight, ln_bias):
        return _inputs.by_definition(reference.primal, *args)
    return _op(*args, backend)


def layer_norm(
    x: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """LN(x) over the channels, in the dtype that is read next: `residual_norm` without the sum.

    Args:
        x, ln_weight, ln_bias, eps, dtype, backend: as `residual_norm`.

    Returns:
        `(B, N, C)`, contiguous.

    Raises:
        TypeError, ValueError, RuntimeError: as `residual_norm`.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, x=x, ln_weight=ln_weight, ln_bias=ln_bias)
    _check(x, ln_weight, ln_bias, eps)
    dtype = _norm_dtype(dtype, x.dtype)
    args = (x, None, None, None, ln_weight, ln_bias, 0, 0, float(eps), dtype)
    if _inputs.transformed(x, ln_weight, ln_bias):
        return _inputs.by_definition(reference.primal, *args)[1]
    return _op(*args, backend)[1]


def _check(x: Tensor, ln_weight: Tensor, ln_bias: Tensor, eps: float) -> None:
    if x.dim() != 3:
        raise ValueError(
            f'{_NAME}: x must have shape (B, N, C), got {x.dim()} dimensions: {tuple(x.shape)}'
        )
    _, count, channels = x.shape
    _inputs.check_not_empty(_NAME, 'x', x, N=count, C=channels)
    _check_float('x', x.dtype)
    state = _inputs.state_dtype(x.dtype)
    for name, value in (('ln_weight', ln_weight), ('ln_bias', ln_bias)):
        _inputs.check_shape(_NAME, name, value, (channels,), '(C,)')
        _inputs.check_dtype(_NAME, name, value, state, f'where x is {x.dtype}')
    _inputs.check_number(_NAME, 'eps', eps, 0)


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in _inputs.FLOATS:
        raise TypeError(
            f'{_NAME}: {name} must be float32, bfloat16, float16 or float64, got {dtype}'
        )


def _norm_dtype(dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    _check_float('dtype', dtype or default)
    return dtype or default


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::residual_norm', mutates_args=())
def _op(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    h: int,
    w: int,
    eps: float,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    # The dispatcher leaves autocast on in here, and it would round the weights.
    with torch.autocast(x.device.type, enabled=False):
        return _choose(backend, x).forward(
            x, branch, weight, bias, ln_weight, ln_bias, h, w, eps, dtype
        )


@torch.library.custom_op('ttt_kernels::residual_norm_backward', mutates_args=())
def _backward_op(
    dy: Tensor,
    dn: Tensor,
    y: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    ln_weight: Tensor,
    h: int,
    w: int,
    eps: float,
    dx_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(y.device.type, enabled=False):
        return _choose(backend, y).backward(
            dy, dn, y, x, weight, ln_weight, h, w, eps, (dx_dtype, branch_dtype)
        )


def _choose(backend: str, x: Tensor):
    kernel = _backend.choose(_NAME, backend, x, lambda kernel: kernel.unsupported_reason(x))
    return reference if kernel is None else kernel


@_op.register_fake
def _(x, branch, weight, bias, ln_weight, ln_bias, h, w, eps, dtype, backend):
    kept = weight is not None or branch is not None
    y = x.new_empty(x.shape if kept else 0, dtype=reference.sum_dtype(x, branch))
    return y, x.new_empty(x.shape, dtype=dtype)


@_backward_op.register_fake
def _(dy, dn, y, x, weight, ln_weight, h, w, eps, dx_dtype, branch_dtype, backend):
    own = x is None and branch_dtype != dx_dtype
    return (
        y.new_empty(y.shape, dtype=dx_dtype),
        y.new_empty(y.shape if own else 0, dtype=branch_dtype),
        ln_weight.new_empty(0 if weight is None else weight.shape),
        ln_weight.new_empty(0 if weight is None else weight.shape[0]),
        ln_weight.new_empty((2, ln_weight.shape[0])),
    )


def _setup_context(ctx, inputs, output):
    x, branch, weight, bias, ln_weight, _, ctx.h, ctx.w, ctx.eps, _, ctx.backend = inputs
    ctx.x_dtype = x.dtype
    ctx.branch_dtype = None if branch is None else branch.dtype
    ctx.has_bias = bias is not None
    y = x if branch is None and weight is None else output[0]
    ctx.save_for_backward(y, None if weight is None else x, weight, ln_weight)


def _backward(ctx, dy, dn):
    other = ctx.branch_dtype or ctx.x_dtype
    saved = ctx.saved_tensors
    args = (dy, dn, *saved, ctx.h, ctx.w, ctx.eps)
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.by_definition(reference.gradients, *args, (ctx.x_dtype, other))
    else:
        grads = _backward_op(*args, ctx.x_dtype, other, ctx.backend)
    dx, dbranch, dweight, dbias, dln = grads
    if ctx.branch_dtype is None:
        dweight = None if saved[2] is None else dweight
        return dx, None, dweight, dbias if ctx.has_bias else None, *dln.unbind(), *[None] * 5
    return dx, dx if other == ctx.x_dtype else dbranch, None, None, *dln.unbind(), *[None] * 5


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.residual_norm)
def _forward_flops(x_shape, branch_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    """2·9 per token and channel of the convolution; counters leave out sums and norms."""
    batch, count, channels = x_shape
    return 0 if weight_shape is None else 2 * 9 * batch * count * channels


@register_flop_formula(torch.ops.ttt_kernels.residual_norm_backward)
def _backward_flops(
    dy_shape, dn_shape, y_shape, x_shape, weight_shape, *args, out_shape=None, **kwargs
) -> int:
    """Twice as many: the gradients of the tokens and of the weights."""
    batch, count, channels = y_shape
    return 0 if weight_shape is None else 4 * 9 * batch * count * channels
