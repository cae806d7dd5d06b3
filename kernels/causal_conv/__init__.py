"""Depth-wise causal convolutions along scans (vision-ttt Sec. 4.3), as a registered op."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference

_NAME = 'causal_conv'


def causal_conv(
    x: Tensor,
    *weights: Tensor,
    directions: tuple[str, ...] = ('forward', 'backward'),
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Filters every scan along its tokens; a token sees itself and its past (Algorithm 1, l. 10).

    With K taps, `y[t] = Σ_j weight[j]·x[t − (K − 1 − j)]` in a 'forward' scan, and
    `x[t + (K − 1 − j)]` in a 'backward' one, whose past lies at larger t; a scan is zero before its
    first token. Two weights on the same tokens (q and k of a shared projection) read them once.

    B images, T tokens, R = len(directions) scans, C channels.

    Args:
        x: `(B, T, R, C)`, fp32, bf16, fp16 or fp64; any strides, so that it may be a view of a
            packed projection.
        weights: one or two `(R, C, K)`, fp32 (fp64 where x is fp64).
        directions: per scan, 'forward' or 'backward'. The output of token t stands at t in both.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Sums are kept in the dtype of the weights. Under autocast x goes to the autocast dtype, the
    weights stay fp32.

    Returns:
        One `(B, T, R, C)` for each weight, contiguous, dtype of x.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, number of weights or T = 0, mixed devices, an unknown direction
            or backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    if not 1 <= len(weights) <= 2:
        raise ValueError(f'{_NAME}: give one or two weights, got {len(weights)}')
    weight, other = (*weights, None)[:2]
    _inputs.check_tensors(_NAME, optional=('other',), x=x, weight=weight, other=other)
    (x,) = _inputs.to_autocast(x)
    ways = _inputs.direction_letters(_NAME, directions)
    _check(ways, x, weight, other)
    if _inputs.transformed(x, weight, other):
        return tuple(_inputs.by_definition(_outputs, x, weight, other, ways))
    return _op(x, weight, other, ways, backend)[: len(weights)]


def _outputs(x: Tensor, weight: Tensor, other: Tensor | None, ways: str) -> Tensor:
    """The definition: `(1, B, T, R, C)`, or 2 for two weights."""
    weights = (weight,) if other is None else (weight, other)
    return torch.stack([reference.primal(x, w, ways) for w in weights])


def _check(ways: str, x: Tensor, weight: Tensor, other: Tensor | None) -> None:
    if x.dim() != 4:
        raise ValueError(
            f'{_NAME}: x must have shape (B, T, R, C), got {x.dim()} dimensions: {tuple(x.shape)}'
        )
    _, tokens, scans, channels = x.shape
    _inputs.check_not_empty(_NAME, 'x', x, T=tokens, C=channels)
    if scans != len(ways):
        raise ValueError(
            f'{_NAME}: x has R = {scans} scans for {len(ways)} directions; give one direction '
            'for each scan'
        )
    if x.dtype not in _inputs.FLOATS:
        raise TypeError(f'{_NAME}: x must be float32, bfloat16, float16 or float64, got {x.dtype}')
    if weight.dim() != 3 or weight.shape[2] == 0:
        raise ValueError(
            f'{_NAME}: weight must have shape (R, C, K), K ≥ 1, got {tuple(weight.shape)}'
        )
    shape = (scans, channels, weight.shape[2])
    for name, w in (('weight', weight), ('other', other)):
        if w is not None:
            _inputs.check_shape(_NAME, name, w, shape, '(R, C, K)')
            state = _inputs.state_dtype(x.dtype)
            _inputs.check_dtype(_NAME, name, w, state, f'where x is {x.dtype}')


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::causal_conv', mutates_args=())
def _op(
    x: Tensor, weight: Tensor, other: Tensor | None, directions: str, backend: str
) -> tuple[Tensor, Tensor]:
    # The dispatcher leaves autocast on here; it would round the weights.
    with torch.autocast(x.device.type, enabled=False):
        return _choose(backend, x, weight).forward(x, weight, other, directions)


@torch.library.custom_op('ttt_kernels::causal_conv_backward', mutates_args=())
def _backward_op(
    dy: Tensor,
    dz: Tensor | None,
    x: Tensor,
    weight: Tensor,
    other: Tensor | None,
    directions: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        return _choose(backend, x, weight).backward(dy, dz, x, weight, other, directions)


def _choose(backend: str, x: Tensor, weight: Tensor):
    kernel = _backend.choose(_NAME, backend, x, lambda kernel: kernel.unsupported_reason(x, weight))
    return reference if kernel is None else kernel


@_op.register_fake
def _(x, weight, other, directions, backend):
    return x.new_empty(x.shape), x.new_empty(0 if other is None else x.shape)


@_backward_op.register_fake
def _(dy, dz, x, weight, other, directions, backend):
    last = weight.new_empty(0 if other is None else other.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), last


def _setup_context(ctx, inputs, output):
    *tensors, ctx.directions, ctx.backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dz):
    x, weight, other = ctx.saved_tensors
    # One of the two outputs may be unused.
    some = dz if dy is None else dy
    if some is None:
        return None, None, None, None, None
    dy = torch.zeros_like(some) if dy is None else dy
    if other is None:
        dz = None
    elif dz is None:
        dz = torch.zeros_like(some)
    if torch.is_grad_enabled():  # the gradients will be differentiated
        do = torch.stack([dy] if dz is None else [dy, dz])
        inputs = (x, weight, other)
        return *_inputs.gradients_of(_outputs, do, inputs, ctx.directions), None, None
    dx, dweight, dother = _backward_op(dy, dz, x, weight, other, ctx.directions, ctx.backend)
    return dx, dweight, None if other is None else dother, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.causal_conv)
def _forward_flops(x_shape, weight_shape, other_shape, *args, out_shape=None, **kwargs) -> int:
    """2K per token, channel and weight, as for any convolution."""
    return 2 * _products(x_shape, weight_shape, other_shape)


@register_flop_formula(torch.ops.ttt_kernels.causal_conv_backward)
def _backward_flops(
    dy_shape, dz_shape, x_shape, weight_shape, other_shape, *args, out_shape=None, **kwargs
) -> int:
    """Twice as many: the gradients of x and of the weights."""
    return 4 * _products(x_shape, weight_shape, other_shape)


def _products(x_shape, weight_shape, other_shape) -> int:
    batch, tokens, scans, channels = x_shape
    weights = 1 if other_shape is None else 2
    return weights * weight_shape[-1] * batch * tokens * scans * channels
