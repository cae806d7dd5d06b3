"""ViT³'s gated inner model, f(x) = (xW1)⊙silu(xW2), with one full-batch training step, as an op."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference

_NAME = 'ttt_glu'


def ttt_glu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    scale: float = 1 / 3,
    damping: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Applies a gated linear unit to q after one gradient step on (k, v) (ViT³, Sec. 4).

    Every image and head starts from its (W1, W2), takes one step of 1.0 on the inner loss
    `−(scale/N)·Σ f(k)·v` over all N tokens, `f(x) = (xW1)⊙silu(xW2)`, and returns f(q) of the new
    weights. `damping` divides each column of a gradient by its norm plus 1: `g/(‖g‖₂ + 1)`.

    B images, N tokens, H heads, d channels a head.

    Args:
        q, k, v: `(B, N, H, d)`, N ≥ 1, one dtype of fp32, bf16, fp16, fp64; any strides, so that
            they may be views of one packed projection.
        w1, w2: `(H, d, d)` fp32 (fp64 where q is fp64), row vectors.
        scale: s of the inner loss; s/N is applied in fp32 after the sum over the tokens.
        damping: True as published; False takes the plain gradient.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Inner gradients and sums are kept in the dtype of the weights. Under autocast q, k and v go to
    the autocast dtype, the weights stay fp32.

    Returns:
        `(B, N, H, d)`, contiguous, dtype of q.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, N = 0, mixed devices, an unknown backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, q=q, k=k, v=v, w1=w1, w2=w2)
    q, k, v = _inputs.to_autocast(q, k, v)
    _inputs.check_inner_step(_NAME, q, k, v, w1=w1, w2=w2)
    _inputs.check_number(_NAME, 'scale', scale)
    _inputs.check_bool(_NAME, 'damping', damping)
    args = (q, k, v, w1, w2, float(scale), damping)
    if _inputs.transformed(*args[:5]):
        return _inputs.by_definition(reference.primal, *args)
    return _op(*args, backend)[0]


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::ttt_glu', mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    scale: float,
    damping: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kernel = _choose(backend, q)
    if kernel is not None:
        return kernel.forward(q, k, v, w1, w2, scale, damping)
    # The dispatcher leaves autocast on here; it would round the inner weights.
    with torch.autocast(q.device.type, enabled=False):
        return reference.forward(q, k, v, w1, w2, scale, damping)


@torch.library.custom_op('ttt_kernels::ttt_glu_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    g: Tensor,
    scale: float,
    damping: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernel = _choose(backend, q)
    if kernel is not None:
        return kernel.backward(do, q, k, v, w1, w2, g, scale, damping)
    with torch.autocast(q.device.type, enabled=False):
        return reference.backward(do, q, k, v, w1, w2, g, scale, damping)


def _choose(backend: str, q: Tensor):
    return _backend.choose(_NAME, backend, q, lambda kernel: kernel.unsupported_reason(q))


@_op.register_fake
def _(q, k, v, w1, w2, scale, damping, backend):
    batch, _, heads, dim = q.shape
    g = w1.new_empty((batch, heads, dim, 2 * dim))
    return q.new_empty(q.shape), g


@_backward_op.register_fake
def _(do, q, k, v, w1, w2, g, scale, damping, backend):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, w1, w2))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.damping, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])
    # The inner gradient is an output for the backward pass only.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _):
    if do is None:  # from a function that has no gradient for its input
        return (None,) * 8
    # Under checkpointing the saved tensors can be unpacked only once.
    saved, options = ctx.saved_tensors, (ctx.scale, ctx.damping)
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.gradients_of(reference.primal, do, saved[:5], *options)
    else:
        grads = _backward_op(do, *saved, *options, ctx.backend)
    return *grads, None, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


@register_flop_formula(torch.ops.ttt_kernels.ttt_glu)
def _forward_flops(q_shape, *args, out_shape=None, **kwargs) -> int:
    """2·6d² per token and head: z1, z2, G1, G2, u1, u2, 2 per multiply-accumulate."""
    batch, tokens, heads, dim = q_shape
    return 2 * batch * tokens * heads * 6 * dim * dim


@register_flop_formula(torch.ops.ttt_kernels.ttt_glu_backward)
def _backward_flops(do_shape, *args, out_shape=None, **kwargs) -> int:
    """2·16d²: the reading u, dQ, dW′ (2 each); the step z, r, Kᵀdz (2 each) and dK (4)."""
    batch, tokens, heads, dim = do_shape
    return 2 * batch * tokens * heads * 16 * dim * dim
