"""TTT-linear: Vittt's mini-batch scan, f(x) = x + LN(Wx + b) (App. A, B), as a registered op."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _backend, _inputs
from . import reference
from .definition import Inputs, dual

_NAME = 'ttt_linear'


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    token_scale: Tensor | None = None,
    *,
    directions: tuple[str, ...] = ('forward', 'backward'),
    mini_batch_size: int = 16,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Applies to every token a state trained on the tokens before it (App. A, B).

    Each head of each scan has a linear model (W, c), which starts at (`w0`, `b0`) and learns along
    the scan to reconstruct v from k: f(x) = x + LN(xW + c), inner loss ½‖f(k) − v‖². The gradients
    of a mini-batch are taken at the state before it; token t is read with its own state, which
    holds the steps of every token s ≤ t: `O_t = f(q_t; W_t, c_t)`, where `W_t = W − Σ_{s ≤ t}
    token_scale[t]·eta[s]·∇_W ℓ(W; s)` inside a mini-batch.

    B images, T tokens, R = len(directions) scans of the same tokens, H heads, d channels a head.

    Args:
        q, k, v: `(B, T, R, H, d)`, T ≥ 1, one dtype of fp32, bf16, fp16, fp64; any strides.
            `[:, t, r]` is the token at position t as scan r sees it, in either direction.
        eta: `(B, T, R, H)` step of every token, ready to use: eta_base·σ(·)/d.
        w0: `(R, H, d, d)` initial state, `Z = K W + c` with row vectors.
        b0: `(R, H, d)` initial bias c.
        ln_weight, ln_bias: `(R, H, d)` of the inner LayerNorm.
        token_scale: `(R, mini_batch_size)` factor of the step by the reader's place in the
            mini-batch; None is ones. The state after a mini-batch uses its last entry.
        directions: per scan, 'forward' (reads tokens 0…T−1) or 'backward' (T−1…0). The output of
            token t stands at t in both.
        mini_batch_size: tokens whose gradients share one state, ≥ 1; more than T is one mini-batch.
        eps: of the inner LayerNorm.
        backend: None takes the Triton kernel on a GPU and the numba kernel on a CPU, where there is
            one that can run, and the reference elsewhere; 'triton', 'numba' or 'reference' forces
            one.

    eta and the parameters are fp32 (fp64 where q is fp64) and may be expanded views. State and sums
    are kept in that dtype. Under autocast q, k and v go to the autocast dtype, the rest to fp32.

    Returns:
        O, `(B, T, R, H, d)`, contiguous, dtype of q.

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, T = 0, mixed devices, an unknown direction or backend.
        RuntimeError: `backend='triton'` or 'numba' where there is no such kernel, or it cannot run.
    """
    backend = _backend.resolve(_NAME, backend)
    tensors = {
        'q': q,
        'k': k,
        'v': v,
        'eta': eta,
        'w0': w0,
        'b0': b0,
        'ln_weight': ln_weight,
        'ln_bias': ln_bias,
        'token_scale': token_scale,
    }
    _inputs.check_tensors(_NAME, optional=('token_scale',), **tensors)
    if _inputs.autocasting(q.device):
        tensors['q'], tensors['k'], tensors['v'] = q, k, v = _inputs.to_autocast(q, k, v)
        # Steps are outputs of a linear layer, so autocast has rounded them already.
        tensors['eta'] = eta = eta.to(_inputs.state_dtype(q.dtype))
    ways = _inputs.direction_letters(_NAME, directions)
    _check(ways, mini_batch_size, **tensors)
    inputs = Inputs(**tensors)
    _inputs.check_number(_NAME, 'eps', eps, least=0)
    if _inputs.transformed(*inputs):
        return _inputs.by_definition(_dual, *inputs, ways, mini_batch_size, float(eps))
    # Intermediate results are written only if there will be a backward pass.
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _op(*inputs, ways, mini_batch_size, float(eps), backend, keep)[0]


def _dual(*args: Any) -> Tensor:
    return dual(Inputs(*args[:9]), *args[9:])


def _check(ways: str, mini_batch_size: int, **tensors: Tensor | None) -> None:
    q, token_scale = tensors['q'], tensors['token_scale']
    if q.dim() != 5:
        raise ValueError(
            f'{_NAME}: q must have shape (B, T, R, H, d), got {q.dim()} dimensions: '
            f'{tuple(q.shape)}'
        )
    batch, tokens, scans, heads, dim = q.shape
    _inputs.check_not_empty(_NAME, 'q', q, T=tokens, H=heads, d=dim)
    if scans != len(ways):
        raise ValueError(
            f'{_NAME}: q has R = {scans} scans for {len(ways)} directions; give one direction '
            'for each scan'
        )
    if isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int | torch.SymInt):
        raise TypeError(f'{_NAME}: mini_batch_size must be an int, got {mini_batch_size!r}')
    if mini_batch_size < 1:
        raise ValueError(
            f"{_NAME}: mini_batch_size must be at least 1, got {mini_batch_size}; 16 is the paper's"
        )
    letters = {
        'k': ('(B, T, R, H, d)', q.shape),
        'v': ('(B, T, R, H, d)', q.shape),
        'eta': ('(B, T, R, H)', (batch, tokens, scans, heads)),
        'w0': ('(R, H, d, d)', (scans, heads, dim, dim)),
        'b0': ('(R, H, d)', (scans, heads, dim)),
        'ln_weight': ('(R, H, d)', (scans, heads, dim)),
        'ln_bias': ('(R, H, d)', (scans, heads, dim)),
    }
    if token_scale is not None:
        letters['token_scale'] = ('(R, mini_batch_size)', (scans, mini_batch_size))
    if q.dtype not in _inputs.FLOATS:
        raise TypeError(f'{_NAME}: q must be float32, bfloat16, float16 or float64, got {q.dtype}')
    state = _inputs.state_dtype(q.dtype)
    for name, (meaning, shape) in letters.items():
        _inputs.check_shape(_NAME, name, tensors[name], shape, meaning)
        if name in 'kv':
            _inputs.check_dtype(_NAME, name, tensors[name], q.dtype, 'as q is')
        else:
            why = f'where q is {q.dtype}'
            _inputs.check_dtype(_NAME, name, tensors[name], state, why)


# ------------------------------------------------------------------------------------ registration


@torch.library.custom_op('ttt_kernels::ttt_linear', mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    token_scale: Tensor | None,
    directions: str,
    mini_batch_size: int,
    eps: float,
    backend: str,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale)
    kernel = _choose(backend, mini_batch_size, inputs)
    if kernel is not None:
        return kernel.forward(inputs, directions, mini_batch_size, eps, keep)
    # The dispatcher leaves autocast on here; it would round the state.
    with torch.autocast(q.device.type, enabled=False):
        return reference.forward(inputs, directions, mini_batch_size, eps, keep)


@torch.library.custom_op('ttt_kernels::ttt_linear_backward', mutates_args=())
def _backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    token_scale: Tensor | None,
    z_kept: Tensor,
    w_kept: Tensor,
    c_kept: Tensor,
    directions: str,
    mini_batch_size: int,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale)
    kernel = _choose(backend, mini_batch_size, inputs)
    if kernel is not None:
        # The gradient of a sum comes as a view of one number, with stride 0.
        saved, options = (z_kept, w_kept, c_kept), (directions, mini_batch_size, eps)
        return kernel.backward(do.contiguous(), inputs, *saved, *options)
    with torch.autocast(q.device.type, enabled=False):
        return reference.backward(do, inputs, z_kept, directions, mini_batch_size, eps)


def _choose(backend: str, mini_batch_size: int, inputs: Inputs):
    return _backend.choose(
        _NAME, backend, inputs.q, lambda kernel: kernel.unsupported_reason(inputs, mini_batch_size)
    )


@_op.register_fake
def _(q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale, ways, size, eps, backend, keep=True):
    batch, tokens, scans, heads, dim = q.shape
    # Ceilings. One in `segment` of the mini-batches of T tokens stores its state.
    states = -(tokens // -(reference.segment(size) * size)) if keep else 0
    new = {'dtype': _inputs.state_dtype(q.dtype)}
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape if keep else 0, dtype=reference.kept_dtype(q.dtype)),
        q.new_empty((batch, scans, heads, states, dim, dim), **new),
        q.new_empty((batch, scans, heads, states, dim), **new),
    )


@_backward_op.register_fake
def _(do, q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale, *rest):
    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias)
    last = w0.new_empty((w0.shape[0], 0)) if token_scale is None else token_scale
    return *(x.new_empty(x.shape) for x in tensors), last.new_empty(last.shape)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.directions, ctx.mini_batch_size, ctx.eps, ctx.backend, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    # Z and the states are outputs for the backward pass only.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, *_):
    if do is None:  # from a function that has no gradient for its input
        return (None,) * 14
    options = (ctx.directions, ctx.mini_batch_size, ctx.eps)
    # Under checkpointing the saved tensors can be unpacked only once.
    saved = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradients will be differentiated
        grads = _inputs.gradients_of(_dual, do, saved[:9], *options)
        return *grads, None, None, None, None, None
    if saved[9].numel() == 0 and do.numel():
        # Inside vmap no tensor says that it requires a gradient, and nothing was kept.
        saved = (*saved[:9], *_op(*saved[:9], *options, ctx.backend, True)[1:])
    *grads, dtoken_scale = _backward_op(do, *saved, *options, ctx.backend)
    return *grads, None if saved[8] is None else dtoken_scale, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- FLOPs


def _tokens_and_sizes(q_shape, mini_batch_size: int) -> tuple[int, int, int]:
    batch, tokens, scans, heads, dim = q_shape
    return batch * tokens * scans * heads, dim, min(mini_batch_size, tokens)


@register_flop_formula(torch.ops.ttt_kernels.ttt_linear)
def _forward_flops(q_shape, *args, out_shape=None, **kwargs) -> int:
    """2(3d² + 2bd) per token, head and scan: Eq. 13's inner loop, 2 per multiply-accumulate."""
    tokens, dim, size = _tokens_and_sizes(q_shape, args[9])
    return 2 * tokens * (3 * dim * dim + 2 * size * dim)


@register_flop_formula(torch.ops.ttt_kernels.ttt_linear_backward)
def _backward_flops(do_shape, *args, out_shape=None, **kwargs) -> int:
    """2(8d² + 6bd) per token, head and scan, recomputation of the states included."""
    tokens, dim, size = _tokens_and_sizes(do_shape, args[13])
    return 2 * tokens * (8 * dim * dim + 6 * size * dim)
