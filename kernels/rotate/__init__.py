"""The rotary positions of H-ViT³, pairs of channels turned, as an op."""

import torch
from torch import Tensor

from .. import _backend, _inputs
from . import reference

_NAME = 'rotate'


def rotate(x: Tensor, rotation: Tensor, *, backend: str | None = None) -> Tensor:
    """Turns the pairs of neighbouring channels of every token.

    B images, N tokens, C channels.

    Args:
        x: `(B, N, C)`, C even, fp32, bf16, fp16 or fp64; any strides.
        rotation: `(N, C / 2)` unit complex numbers, complex64 (complex128 where x is fp64); a
            constant.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Returns:
        `(B, N, C)` in the dtype of x, or of autocast, contiguous. Products are in fp32.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, N or C = 0, a rotation that requires a gradient, mixed devices,
            an unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, x=x, rotation=rotation)
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f'{_NAME}: x must have shape (B, N, C) with C even, got {tuple(x.shape)}')
    if x.dtype not in _inputs.FLOATS:
        raise TypeError(f'{_NAME}: x must be float32, bfloat16, float16 or float64, got {x.dtype}')
    _, count, channels = x.shape
    _inputs.check_not_empty(_NAME, 'x', x, N=count, C=channels)
    _inputs.check_shape(_NAME, 'rotation', rotation, (count, channels // 2), '(N, C / 2)')
    dtype = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    _inputs.check_dtype(_NAME, 'rotation', rotation, dtype, f'where x is {x.dtype}')
    if rotation.requires_grad:
        raise ValueError(f'{_NAME}: rotation requires a gradient; give rotation.detach()')
    (x,) = _inputs.to_autocast(x)
    if _inputs.transformed(x, rotation):
        return _inputs.by_definition(reference.primal, x, rotation)
    return _op(x, rotation, backend)


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::rotate', mutates_args=())
def _op(x: Tensor, rotation: Tensor, backend: str) -> Tensor:
    return _choose(backend, x).forward(x, rotation)


@torch.library.custom_op('ttt_kernels::rotate_backward', mutates_args=())
def _backward_op(do: Tensor, rotation: Tensor, backend: str) -> Tensor:
    return _choose(backend, do).backward(do, rotation)


def _choose(backend: str, x: Tensor):
    kernel = _backend.choose(_NAME, backend, x, lambda kernel: kernel.unsupported_reason(x))
    return reference if kernel is None else kernel


@_op.register_fake
@_backward_op.register_fake
def _(x, rotation, backend):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    _, rotation, ctx.backend = inputs
    ctx.save_for_backward(rotation)


def _backward(ctx, do):
    (rotation,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradient will be differentiated
        return _inputs.by_definition(reference.gradient, do, rotation), None, None
    return _backward_op(do, rotation, ctx.backend), None, None


_op.register_autograd(_backward, setup_context=_setup_context)
