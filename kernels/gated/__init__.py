"""Gates of mixers and of feed-forwards, a product with an activation, as an op."""

import torch
from torch import Tensor

from .. import _backend, _inputs
from . import reference

_NAME = 'gated'


def gated(
    x: Tensor, gate: Tensor, *, activation: str = 'gelu', backend: str | None = None
) -> Tensor:
    """(Σ_r x_r)·act(gate).

    B images, N tokens, R branches, C channels.

    Args:
        x: `(B, N, R, C)`, fp32, bf16, fp16 or fp64; any strides.
        gate: `(B, N, C)` in the dtype of x; any strides.
        activation: 'gelu' (by the error function) or 'silu'.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Returns:
        `(B, N, C)` in the dtype of x, or of autocast, contiguous. Sum and product are in fp32.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, N, R or C = 0, mixed devices, an unknown activation or backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, x=x, gate=gate)
    _check(x, 4, '(B, N, R, C)', activation)
    batch, count, branches, channels = x.shape
    _inputs.check_not_empty(_NAME, 'x', x, N=count, R=branches, C=channels)
    _inputs.check_shape(_NAME, 'gate', gate, (batch, count, channels), '(B, N, C)')
    x, gate = _inputs.to_autocast(x, gate)
    _inputs.check_dtype(_NAME, 'gate', gate, x.dtype, 'as x is')
    return _call(x, gate, None, activation, backend)


def glu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = 'silu',
    backend: str | None = None,
) -> Tensor:
    """act(a)·v of x + bias = [a, v], the halves of the channels: `gated`.

    Args:
        x: `(B, N, 2·C)`; any strides.
        bias: `(2·C,)` fp32 (fp64 where x is fp64), or None.
        activation, backend: as `gated`.

    Returns:
        `(B, N, C)` in the dtype of x, or of autocast, contiguous.

    Raises:
        TypeError, ValueError, RuntimeError: as `gated`.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, ('bias',), x=x, bias=bias)
    _check(x, 3, '(B, N, 2·C)', activation)
    channels = x.shape[-1]
    _inputs.check_not_empty(_NAME, 'x', x, N=x.shape[1], C=channels)
    if channels % 2:
        raise ValueError(f'{_NAME}: x must have two halves, got {channels} channels')
    return _call_packed(x, bias, 2, activation, backend)


def biased_act(
    x: Tensor, bias: Tensor, *, activation: str = 'gelu', backend: str | None = None
) -> Tensor:
    """act(x + bias), whose backward pass sums the bias's gradient while it writes x's: `gated`.

    Args:
        x: `(B, N, C)`; any strides.
        bias: `(C,)` fp32 (fp64 where x is fp64).
        activation, backend: as `gated`.

    Returns:
        `(B, N, C)` in the dtype of x, or of autocast, contiguous.

    Raises:
        TypeError, ValueError, RuntimeError: as `gated`.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, x=x, bias=bias)
    _check(x, 3, '(B, N, C)', activation)
    _inputs.check_not_empty(_NAME, 'x', x, N=x.shape[1], C=x.shape[2])
    return _call_packed(x, bias, 1, activation, backend)


def _call_packed(
    x: Tensor, bias: Tensor | None, parts: int, activation: str, backend: str
) -> Tensor:
    """`gated` of a gate and branches side by side in the channels, `(B, N, parts·C)`."""
    if bias is not None:
        _inputs.check_shape(_NAME, 'bias', bias, x.shape[-1:], '(C,)')
        state = _inputs.state_dtype(x.dtype)
        _inputs.check_dtype(_NAME, 'bias', bias, state, f'where x is {x.dtype}')
        bias = bias.unflatten(0, (parts, -1))
    (x,) = _inputs.to_autocast(x)
    return _call(x.unflatten(-1, (parts, -1)), None, bias, activation, backend)


def _check(x: Tensor, dims: int, shape: str, activation: str) -> None:
    if x.dim() != dims:
        raise ValueError(
            f'{_NAME}: x must have shape {shape}, got {x.dim()} dimensions: {tuple(x.shape)}'
        )
    if x.dtype not in _inputs.FLOATS:
        raise TypeError(f'{_NAME}: x must be float32, bfloat16, float16 or float64, got {x.dtype}')
    if activation not in reference.ACTIVATIONS:
        known = ' or '.join(map(repr, reference.ACTIVATIONS))
        raise ValueError(f'{_NAME}: activation must be {known}, got {activation!r}')


def _call(
    x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str, backend: str
) -> Tensor:
    if _inputs.transformed(x, gate, bias):
        return _inputs.by_definition(reference.primal, x, gate, bias, activation)
    return _op(x, gate, bias, activation, backend)


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::gated', mutates_args=())
def _op(
    x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str, backend: str
) -> Tensor:
    return _choose(backend, x).forward(x, gate, bias, activation)


@torch.library.custom_op('ttt_kernels::gated_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    x: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    activation: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _choose(backend, x).backward(do, x, gate, bias, activation)


def _choose(backend: str, x: Tensor):
    kernel = _backend.choose(_NAME, backend, x, lambda kernel: kernel.unsupported_reason(x))
    return reference if kernel is None else kernel


@_op.register_fake
def _(x, gate, bias, activation, backend):
    batch, count, _, channels = x.shape
    return x.new_empty((batch, count, channels))


@_backward_op.register_fake
def _(do, x, gate, bias, activation, backend):
    dgate = x.new_empty(0 if gate is None else gate.shape)
    wide = _inputs.state_dtype(x.dtype)
    return x.new_empty(x.shape), dgate, x.new_empty(0 if bias is None else bias.shape, dtype=wide)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, do):
    saved = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.gradients_of(reference.primal, do, saved, ctx.activation)
    else:
        grads = _backward_op(do, *saved, ctx.activation, ctx.backend)
    grads = (None if x is None else grad for x, grad in zip(saved, grads, strict=True))
    return *grads, None, None


_op.register_autograd(_backward, setup_context=_setup_context)
