"""GELU, depth-wise 3×3 and GELU between the linear layers of H-ViT³'s feed-forward, as an op."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference

_NAME = 'gelu_conv'


def gelu_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    hw: tuple[int, int],
    backend: str | None = None,
) -> Tensor:
    """gelu(a + conv(a) + bias), a = gelu(x), depth-wise 3×3 with zero padding.

    GELU takes the error function. B images, C channels.

    Args:
        x: `(B, h·w, C)`, pixels row by row; fp32, bf16, fp16 or fp64; any strides.
        weight: `(C, 3, 3)` fp32 (fp64 where x is fp64).
        bias: `(C,)` in the dtype of the weight, or None.
        hw: Height and width of the map, python ints.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Returns:
        `(B, h·w, C)` in the dtype of x, or of autocast, contiguous. All inside is in fp32.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, h, w or C = 0, mixed devices, an unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, ('bias',), x=x, weight=weight, bias=bias)
    if x.dim() != 3:
        raise ValueError(
            f'{_NAME}: x must have shape (B, N, C), got {x.dim()} dimensions: {tuple(x.shape)}'
        )
    if x.dtype not in _inputs.FLOATS:
        raise TypeError(f'{_NAME}: x must be float32, bfloat16, float16 or float64, got {x.dtype}')
    channels = x.shape[-1]
    _inputs.check_not_empty(_NAME, 'x', x, N=x.shape[1], C=channels)
    h, w = _inputs.check_map(_NAME, 'x', x, hw)
    _inputs.check_conv(_NAME, weight, bias, channels, x.dtype)
    (x,) = _inputs.to_autocast(x)
    args = (x, weight, bias, h, w)
    if _inputs.transformed(x, weight, bias):
        return _inputs.by_definition(reference.primal, *args)
    return _op(*args, backend)


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::gelu_conv', mutates_args=())
def _op(x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int, backend: str) -> Tensor:
    # The dispatcher leaves autocast on in here, and it would round the weights.
    with torch.autocast(x.device.type, enabled=False):
        return _choose(backend, x).forward(x, weight, bias, h, w)


@torch.library.custom_op('ttt_kernels::gelu_conv_backward', mutates_args=())
def _backward_op(
    do: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        return _choose(backend, x).backward(do, x, weight, bias, h, w)


def _choose(backend: str, x: Tensor):
    kernel = _backend.choose(_NAME, backend, x, lambda kernel: kernel.unsupported_reason(x))
    return reference if kernel is None else kernel


@_op.register_fake
def _(x, weight, bias, h, w, backend):
    return x.new_empty(x.shape)


@_backward_op.register_fake
def _(do, x, weight, bias, h, w, backend):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.h, ctx.w, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, do):
    saved, hw = ctx.saved_tensors, (ctx.h, ctx.w)
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.gradients_of(reference.primal, do, saved, *hw)
    else:
        grads = _backward_op(do, *saved, *hw, ctx.backend)
    return *grads[:2], None if saved[2] is None else grads[2], None, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.gelu_conv)
def _forward_flops(x_shape, *args, out_shape=None, **kwargs) -> int:
    """2·9 per token and channel of the convolution; counters leave out sums and GELUs."""
    batch, count, channels = x_shape
    return 2 * 9 * batch * count * channels


@register_flop_formula(torch.ops.ttt_kernels.gelu_conv_backward)
def _backward_flops(do_shape, *args, out_shape=None, **kwargs) -> int:
    """Twice as many: the gradients of the tokens and of the weights."""
    return 2 * _forward_flops(do_shape)
