"""TTT-linear on a CPU, compiled by numba: tensors in, arrays to the kernels, tensors out.

One program runs one scan of one head of one image, from its first chunk to its last, with its
matrices in the cache. Programs are spread over torch's threads, and each has its own part of every
result: results do not depend on the number or order of threads. The backward pass runs each segment
forward from the saved state, then backward.

bf16 and fp16 are converted to fp32 and back, with Z rounded where the reference rounds it.
"""

import numpy as np
import torch
from torch import Tensor

from .._inputs import state_dtype
from .._numba import flat, padded, parallel, sum_in_order
from .._op import Args, Grads
from . import _numba_kernels as kernels
from ._numba_kernels import Gradients, Kept, Numbers, Parameters, Sizes, Tokens
from .definition import Inputs, parts
from .reference import LEAST_EPS, kept_dtype, segment

# A thread holds the scores of a chunk, (b, b). Up to here the kernels are faster than the
# reference.
_LARGEST_MINI_BATCH = 1024


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    if min(args.mini_batch_size, args.q.shape[1]) > _LARGEST_MINI_BATCH:
        return (
            f'mini_batch_size must be at most {_LARGEST_MINI_BATCH} for '
            f'{args.q.shape[1]} tokens, got {args.mini_batch_size}'
        )
    return None


def _common(
    inputs: Inputs, directions: str, mini_batch_size: int, eps: float, filters: Args = ()
) -> tuple[Sizes, Numbers, Parameters]:
    """Sizes, constants and parameters for both passes."""
    _, tokens, scans, heads, dim = inputs.q.shape
    size = min(mini_batch_size, tokens)
    sizes = Sizes(tokens, scans, heads, size, dim, padded(size), padded(dim))
    w0, b0, gain, shift, token_scale = (x if x is None else x.detach() for x in inputs[4:])
    if token_scale is None:
        token_scale = w0.new_ones((scans, mini_batch_size))
    taps = [w.detach().mT for w in filters] or [w0.new_empty((scans, 0, heads * dim))] * 2
    # Copies: FSDP cannot resize a parameter's storage that has ever had a NumPy view.
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (w0, b0, token_scale)]
    w0, b0, token_scale = (x.numpy() for x in copies)
    vectors, taps = torch.stack((gain, shift), -2), torch.stack(taps)
    reverse = np.array([way == 'b' for way in directions])
    parameters = Parameters(reverse, w0, b0, vectors.numpy(), token_scale, taps.numpy())
    kind = w0.dtype.type
    return sizes, Numbers(dim, kind(1 / dim), kind(max(eps, LEAST_EPS)), kind(1)), parameters


def convolved(args: Args, *filters: Tensor) -> Tensor:
    """O of queries and keys that are `causal_conv` of the same tokens, by `(R, H·d, K)` each."""
    return forward(args, False, filters)[0]


def forward(
    args: Args, keep: bool = True, filters: Args = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `reference.forward`, of filtered queries and keys where there are filters."""
    inputs, (directions, mini_batch_size, eps) = parts(args)
    q, k, v, eta = inputs[:4]
    batch, tokens, scans, heads, dim = q.shape
    state = state_dtype(q.dtype)
    sizes, numbers, parameters = _common(inputs, directions, mini_batch_size, eps, filters)
    o = q.new_empty(q.shape, dtype=state)
    z = q.new_empty(q.shape if keep else 0, dtype=state)
    apart = segment(mini_batch_size) * mini_batch_size
    lead = (batch, scans, heads, -(-tokens // apart) if keep else 0)
    w_kept, c_kept = (q.new_empty((*lead, *x), dtype=state) for x in ((dim, dim), (dim,)))
    if batch:
        rows, strides = flat(q, k, v, eta, o, dtype=state, lead=4)
        parallel(
            kernels.forward,
            batch * scans * heads,
            q.numel() * (3 * dim + 2 * mini_batch_size),
            sizes,
            numbers,
            q.dtype == torch.bfloat16,
            apart,
            Tokens(rows[0], rows[1], rows[2], rows[3], strides),
            parameters,
            Kept(z.view(-1).numpy(), w_kept.numpy(), c_kept.numpy()),
            rows[4],
        )
    return o.to(q.dtype), z.to(kept_dtype(q.dtype)), w_kept, c_kept


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """Computes `reference.backward` from the saved states."""
    inputs, (directions, mini_batch_size, eps) = parts(args)
    (do,), (z_kept, w_kept, c_kept) = grads, kept
    q, k, v, eta, w0, *_, token_scale = inputs
    batch, _, scans, heads, dim = q.shape
    state = state_dtype(q.dtype)
    sizes, numbers, parameters = _common(inputs, directions, mini_batch_size, eps)
    dq, dk, dv = (q.new_empty(q.shape, dtype=state) for _ in range(3))
    deta = q.new_empty(q.shape[:-1], dtype=state)
    lead, columns = (batch, scans, heads), sizes[-1]
    dstates = q.new_zeros((*lead, columns + 1, columns), dtype=state)
    dvectors = q.new_zeros((*lead, 2, columns), dtype=state)
    dscale = q.new_zeros((*lead, mini_batch_size), dtype=state)
    if batch:
        rows, strides = flat(q, k, v, eta, dq, deta, dtype=state, lead=4)
        (do, z_kept), _ = flat(do.contiguous(), z_kept.contiguous(), dtype=state, lead=4)
        parallel(
            kernels.backward,
            batch * scans * heads,
            q.numel() * (8 * dim + 6 * mini_batch_size),
            sizes,
            numbers,
            segment(mini_batch_size),
            do,
            Tokens(rows[0], rows[1], rows[2], rows[3], strides),
            parameters,
            Kept(z_kept, w_kept.contiguous().numpy(), c_kept.contiguous().numpy()),
            Gradients(
                rows[4],
                *(x.view(-1).numpy() for x in (dk, dv, deta)),
                *(x.numpy() for x in (dstates, dvectors, dscale)),
            ),
        )
    dstates, dvectors, dscale = (sum_in_order(x) for x in (dstates, dvectors, dscale))
    dscale = w0.new_empty((scans, 0)) if token_scale is None else sum(dscale.unbind(1))
    parameters = (
        dstates[..., :dim, :dim],
        dstates[..., columns, :dim],
        *dvectors[..., :dim].unbind(-2),
    )
    return (
        dq.to(q.dtype),
        dk.to(q.dtype),
        dv.to(q.dtype),
        deta,
        *(x.clone(memory_format=torch.contiguous_format) for x in parameters),
        dscale,
    )
