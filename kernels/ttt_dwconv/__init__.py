"""ViT³'s depth-wise 3×3 inner model with one full-batch training step, as a registered op."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from .._inputs import state_dtype
from . import reference

_NAME = 'ttt_dwconv'


def ttt_dwconv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    *,
    hw: tuple[int, int],
    scale: float = 1 / 3,
    damping: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Filters q with 3×3 kernels after one gradient step on (k, v) (ViT³, Sec. 4).

    Every image starts from the kernels `w3`, one per channel, takes one step of 1.0 on the inner
    loss `−(scale/N)·Σ f(k)·v` over all N = h·w pixels, f a depth-wise convolution with zero padding
    1, and returns f(q) of its new kernels. `damping` divides the gradient of each 3×3 kernel by its
    norm plus 1: `g/(‖g‖₂ + 1)`.

    B images of h×w pixels, d channels.

    Args:
        q, k, v: `(B, h·w, d)`, pixels row by row, one dtype of fp32, bf16, fp16, fp64; any strides,
            so that they may be views of one packed projection.
        w3: `(d, 3, 3)` fp32 (fp64 where q is fp64).
        hw: height and width of the map, python ints.
        scale: s of the inner loss; s/N is applied in fp32 after the sum over the pixels.
        damping: True as published; False takes the plain gradient.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Inner gradients and sums are kept in the dtype of w3. Under autocast q, k and v go to the
    autocast dtype, w3 stays fp32.

    Returns:
        `(B, h·w, d)`, contiguous, dtype of q.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, an empty map, mixed devices, an unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, q=q, k=k, v=v, w3=w3)
    q, k, v = _inputs.to_autocast(q, k, v)
    h, w = _check(q, k, v, w3, hw)
    _inputs.check_number(_NAME, 'scale', scale)
    _inputs.check_bool(_NAME, 'damping', damping)
    args = (q, k, v, w3, h, w, float(scale), damping)
    if _inputs.transformed(*args[:4]):
        return _inputs.by_definition(reference.primal, *args)
    return _op(*args, backend)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, w3: Tensor, hw: tuple[int, int]) -> tuple[int, int]:
    if q.dim() != 3:
        raise ValueError(
            f'{_NAME}: q must have shape (B, h·w, d), got {q.dim()} dimensions: {tuple(q.shape)}'
        )
    dim = q.shape[2]
    h, w = _inputs.check_map(_NAME, 'q', q, hw)
    _inputs.check_not_empty(_NAME, 'q', q, d=dim)
    if q.dtype not in _inputs.FLOATS:
        raise TypeError(f'{_NAME}: q must be float32, bfloat16, float16 or float64, got {q.dtype}')
    for name, x in (('k', k), ('v', v)):
        _inputs.check_shape(_NAME, name, x, q.shape, '(B, h·w, d)')
        _inputs.check_dtype(_NAME, name, x, q.dtype, 'as q is')
    _inputs.check_shape(_NAME, 'w3', w3, (dim, 3, 3), '(d, 3, 3)')
    state = state_dtype(q.dtype)
    _inputs.check_dtype(_NAME, 'w3', w3, state, f'where q is {q.dtype}')
    return h, w


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::ttt_dwconv', mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    h: int,
    w: int,
    scale: float,
    damping: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kernel = _choose(backend, q)
    if kernel is not None:
        return kernel.forward(q, k, v, w3, h, w, scale, damping)
    # The dispatcher leaves autocast on here; it would round the inner weights.
    with torch.autocast(q.device.type, enabled=False):
        return reference.forward(q, k, v, w3, h, w, scale, damping)


@torch.library.custom_op('ttt_kernels::ttt_dwconv_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    g: Tensor,
    h: int,
    w: int,
    scale: float,
    damping: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = _choose(backend, q)
    if kernel is not None:
        return kernel.backward(do, q, k, v, w3, g, h, w, scale, damping)
    with torch.autocast(q.device.type, enabled=False):
        return reference.backward(do, q, k, v, w3, g, h, w, scale, damping)


def _choose(backend: str, q: Tensor):
    return _backend.choose(_NAME, backend, q, lambda kernel: kernel.unsupported_reason(q))


@_op.register_fake
def _(q, k, v, w3, h, w, scale, damping, backend):
    return q.new_empty(q.shape), w3.new_empty((q.shape[0], 9, q.shape[2]))


@_backward_op.register_fake
def _(do, q, k, v, w3, g, h, w, scale, damping, backend):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, w3))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.h, ctx.w, ctx.scale, ctx.damping, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])
    # The inner gradient is an output for the backward pass only.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _):
    if do is None:  # from a function that has no gradient for its input
        return (None,) * 9
    # Under checkpointing the saved tensors can be unpacked only once.
    saved, options = ctx.saved_tensors, (ctx.h, ctx.w, ctx.scale, ctx.damping)
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.gradients_of(reference.primal, do, saved[:4], *options)
    else:
        grads = _backward_op(do, *saved, *options, ctx.backend)
    return *grads, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.ttt_dwconv)
def _forward_flops(q_shape, *args, out_shape=None, **kwargs) -> int:
    """2·18 per pixel and channel: nine products for the gradient, nine for the reading."""
    batch, tokens, dim = q_shape
    return 2 * batch * tokens * dim * 18


@register_flop_formula(torch.ops.ttt_kernels.ttt_dwconv_backward)
def _backward_flops(do_shape, *args, out_shape=None, **kwargs) -> int:
    """2·36 per pixel and channel: nine for each of dQ, dW′, dK and dV."""
    batch, tokens, dim = do_shape
    return 2 * batch * tokens * dim * 36
