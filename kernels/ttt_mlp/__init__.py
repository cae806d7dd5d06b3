"""T⁵'s two-layer and SwiGLU inner models, with one full-batch training step, as a registered op."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference

_NAME = 'ttt_mlp'
LOSSES = ('dot', 'l2')


def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    *,
    loss: str = 'dot',
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """Applies a small MLP to q after one gradient step on (k, v) (T⁵, Sec. 4).

    With two weights it is `f(x) = silu(xW1)·W2`, with three the SwiGLU `f(x) = (silu(xW1)⊙xW2)·W3`.
    Every image and head starts from its weights, takes one step of 1.0 on the inner loss over all
    N tokens, and returns f(q) of the new weights. The loss is `−(scale/N)·Σ f(k)·v`, or
    `(scale/2N)·Σ‖f(k) − v‖²`.

    B images, N tokens, H heads, d channels a head.

    Args:
        q, k, v: `(B, N, H, d)`, N ≥ 1, one dtype of fp32, bf16, fp16, fp64; any strides, so that
            they may be views of one packed projection.
        w1, w2, w3: `(H, d, d)` fp32 (fp64 where q is fp64), row vectors; without w3 the two-layer
            model.
        loss: 'dot' (T⁵ for images) or 'l2' (DiT⁵).
        scale: s of the inner loss, d^−½ in T⁵; s/N is applied in fp32 after the sum over the
            tokens.
        backend: None takes the Triton kernel on a GPU where it can run, and the reference
            elsewhere; 'triton' or 'reference' forces one.

    Inner gradients and sums are kept in the dtype of the weights. Under autocast q, k and v go to
    the autocast dtype, the weights stay fp32.

    Returns:
        `(B, N, H, d)`, contiguous, dtype of q.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, N = 0, mixed devices, an unknown loss or backend.
        RuntimeError: `backend` is 'numba', which this op lacks, or 'triton', which cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    _inputs.check_tensors(_NAME, ('w3',), q=q, k=k, v=v, w1=w1, w2=w2, w3=w3)
    q, k, v = _inputs.to_autocast(q, k, v)
    weights = {'w1': w1, 'w2': w2} | ({} if w3 is None else {'w3': w3})
    _inputs.check_inner_step(_NAME, q, k, v, **weights)
    if loss not in LOSSES:
        raise ValueError(f"{_NAME}: loss must be 'dot' or 'l2', got {loss!r}")
    _inputs.check_number(_NAME, 'scale', scale)
    args = (q, k, v, w1, w2, w3, float(scale), loss)
    if _inputs.transformed(*args[:6]):
        return _inputs.by_definition(reference.primal, *args)
    return _op(*args, backend)[0]


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::ttt_mlp', mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    scale: float,
    loss: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kernel = _choose(backend, q)
    if kernel is not None:
        return kernel.forward(q, k, v, w1, w2, w3, scale, loss)
    # The dispatcher leaves autocast on here; it would round the inner weights.
    with torch.autocast(q.device.type, enabled=False):
        return reference.forward(q, k, v, w1, w2, w3, scale, loss)


@torch.library.custom_op('ttt_kernels::ttt_mlp_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    g: Tensor,
    scale: float,
    loss: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernel = _choose(backend, q)
    if kernel is not None:
        return kernel.backward(do, q, k, v, w1, w2, w3, g, scale, loss)
    with torch.autocast(q.device.type, enabled=False):
        return reference.backward(do, q, k, v, w1, w2, w3, g, scale, loss)


def _choose(backend: str, q: Tensor):
    return _backend.choose(_NAME, backend, q, lambda kernel: kernel.unsupported_reason(q))


@_op.register_fake
def _(q, k, v, w1, w2, w3, scale, loss, backend):
    batch, _, heads, dim = q.shape
    weights = 2 if w3 is None else 3
    return q.new_empty(q.shape), w1.new_empty((batch, heads, weights, dim, dim))


@_backward_op.register_fake
def _(do, q, k, v, w1, w2, w3, g, scale, loss, backend):
    last = w1.new_empty(0) if w3 is None else w3.new_empty(w3.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, w1, w2)), last


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.loss, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])
    # The inner gradients are an output for the backward pass only.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _):
    if do is None:  # from a function that has no gradient for its input
        return (None,) * 9
    # Under checkpointing the saved tensors can be unpacked only once.
    saved = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.gradients_of(reference.primal, do, saved[:6], ctx.scale, ctx.loss)
        return *grads, None, None, None
    *grads, dw3 = _backward_op(do, *saved, ctx.scale, ctx.loss, ctx.backend)
    return *grads, None if saved[5] is None else dw3, None, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs

# Products of a token with a (d, d) matrix, forward and backward, without and with w3.
_PRODUCTS = {'dot': {False: (6, 15), True: (9, 23)}, 'l2': {False: (7, 18), True: (10, 26)}}


def _flops(q_shape, w3_shape, loss: str, way: int) -> int:
    batch, tokens, heads, dim = q_shape
    products = _PRODUCTS[loss][w3_shape is not None][way]
    return 2 * batch * tokens * heads * products * dim * dim


@register_flop_formula(torch.ops.ttt_kernels.ttt_mlp)
def _forward_flops(q, k, v, w1, w2, w3, scale, loss, *args, out_shape=None, **kwargs) -> int:
    """2·6d² per token and head, 2·9d² for SwiGLU, 2 per multiply-accumulate; d² more for 'l2'."""
    return _flops(q, w3, loss, 0)


@register_flop_formula(torch.ops.ttt_kernels.ttt_mlp_backward)
def _backward_flops(
    do, q, k, v, w1, w2, w3, g, scale, loss, *args, out_shape=None, **kwargs
) -> int:
    """2·15d² per token and head, 2·23d² for SwiGLU; 3d² more for 'l2'."""
    return _flops(q, w3, loss, 1)
