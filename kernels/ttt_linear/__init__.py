"""TTT-linear: Vittt's mini-batch scan, f(x) = x + LN(Wx + b) (App. A, B), as a registered op."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _inputs
from .._op import Args, Op
from ..causal_conv import causal_conv
from . import reference
from .definition import dual, parts

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
        backend: 'triton', 'numba' or 'reference' forces one; see `ttt_kernels`.

    eta and the parameters are fp32 (fp64 where q is fp64) and may be expanded views. State and sums
    are kept in that dtype. Under autocast q, k and v go to the autocast dtype, the rest to fp32.

    Returns:
        O, `(B, T, R, H, d)`, contiguous, dtype of q.
    """
    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale)
    return OP(*tensors, directions, mini_batch_size, eps, backend=backend)[0]


def convolved_ttt_linear(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v: Tensor,
    *inputs: Tensor | None,
    directions: tuple[str, ...] = ('forward', 'backward'),
    mini_batch_size: int = 16,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Applies `ttt_linear` to the q and k that `causal_conv` makes of x (Algorithm 1, l. 10 to 17).

    x is `(B, T, R, H·d)`, the weights are `(R, H·d, K)`; for v and all others see `ttt_linear`. On
    a CPU, numba computes both ops in one pass where no gradient is needed.
    """
    heads, weights = v.shape[-2:], (q_weight, k_weight)
    if q_weight.shape == k_weight.shape == (*x.shape[2:], *q_weight.shape[2:]):
        shared = x.unflatten(-1, heads)
        args = (shared, shared, v, *inputs, directions, mini_batch_size, eps)
        out = OP.without_gradients('convolved', args, *weights, backend=backend)
        if out is not None:
            return out
    q, k = causal_conv(x, *weights, directions=directions, backend=backend)
    args = (q.unflatten(-1, heads), k.unflatten(-1, heads), v, *inputs)
    return OP(*args, directions, mini_batch_size, eps, backend=backend)[0]


def _check(*args: Any) -> Args:
    inputs, (directions, mini_batch_size, eps) = parts(args)
    q, _, _, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    sizes = _inputs.sizes_of(_NAME, 'q', q, '(B, T, R, H, d)', 'THd')
    ways = _inputs.direction_letters(_NAME, directions, 'q', q)
    if isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int | torch.SymInt):
        raise TypeError(f'{_NAME}: mini_batch_size={mini_batch_size!r}: give an integer.')
    if mini_batch_size < 1:
        raise ValueError(
            f"{_NAME}: mini_batch_size={mini_batch_size}: give 1 or more; 16 is the paper's."
        )
    _inputs.check_tokens(_NAME, q, sizes, k=inputs.k, v=inputs.v)
    sizes['mini_batch_size'] = mini_batch_size
    check = functools.partial(_inputs.check_parameters, _NAME, q.dtype, sizes)
    check('(B, T, R, H)', eta=eta)
    check('(R, H, d, d)', w0=w0)
    check('(R, H, d)', b0=b0, ln_weight=ln_weight, ln_bias=ln_bias)
    if token_scale is not None:
        check('(R, mini_batch_size)', token_scale=token_scale)
    _inputs.check_number(_NAME, 'eps', eps, least=0)
    return (*inputs, ways, mini_batch_size, float(eps))


def _definition(*args: Any) -> Tensor:
    inputs, options = parts(args)
    return dual(inputs, *options)


def _fake(args: Args, keep: bool) -> tuple[Tensor, ...]:
    q, size = args.q, args.mini_batch_size
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


def _flops(products: int, scores: int, *shapes: Any) -> int:
    """FLOPs of each token of each scan: products with the state and b tokens of a mini-batch."""
    args = OP.arguments(*shapes)
    batch, tokens, scans, heads, dim = args.q
    size = min(args.mini_batch_size, tokens)
    return 2 * batch * tokens * scans * heads * (products * dim * dim + scores * size * dim)


OP = Op(
    _NAME,
    'Tensor q, Tensor k, Tensor v, Tensor eta, Tensor w0, Tensor b0, Tensor ln_weight, '
    'Tensor ln_bias, Tensor? token_scale, str directions, SymInt mini_batch_size, float eps',
    reference,
    _definition,
    _check,
    _fake,
    # Eq. 13's inner loop; backward with recomputation of the states.
    (functools.partial(_flops, 3, 2), functools.partial(_flops, 8, 6)),
    tokens=('q', 'k', 'v'),
    # Steps are outputs of a linear layer, so autocast has rounded them already.
    steps=('eta',),
    kept=('z_kept', 'w_kept', 'c_kept'),
    keeps=True,
    typical={
        'eta': (0.01, 0.003),
        'w0': (0, 0.02),
        'b0': (0, 0.02),
        'ln_weight': (1, 0.1),
        'ln_bias': (0, 0.1),
        'token_scale': (0.5, 0.2),
    },
    cancelling=('eta', 'token_scale'),
)
