"""ViT³'s gated inner model on a CPU, compiled by numba: the forward pass.

A program takes a part of the tokens of one head of one image. bf16 and fp16 are converted to fp32
and back.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _numba
from .._inputs import state_dtype
from .._numba import COLUMNS, add_product, load, parallel, sigmoid, spread
from .._op import Args
from .reference import backward as backward  # from the same g

# Tokens of a program, and of its matrices.
_PART, _CHUNK = 512, 64
unsupported_reason = _numba.unsupported_reason


@_numba.jit
def _run(team, shape, strides, x, y, weights, totals):
    """f(x) to y, or where there are `totals` the sums of [G1 | G2] for keys x and labels y.

    `weights` `(H, d', 2d')`, or B·H of them after the step.
    """
    tokens, heads, parts, dim = shape
    kind, columns, layouts = weights.dtype, weights.shape[1], np.zeros((2, 2), np.int64)
    inputs, labels = np.zeros((_CHUNK, columns), kind), np.zeros((_CHUNK, columns), kind)
    z, p = np.zeros((_CHUNK, 2 * columns), kind), np.zeros((_CHUNK, 2 * columns), kind)
    one = kind.type(1)
    start, stop = spread(team, (shape, strides, x, y, weights, totals))
    for number in range(start, stop):
        program, begin = number // parts, number % parts * _PART
        for i in range(2):
            layouts[i, 0] = program // heads * strides[i, 0] + program % heads * strides[i, 2]
            layouts[i, 1] = strides[i, 1]
        for first in range(begin, min(begin + _PART, tokens), _CHUNK):
            count = min(_CHUNK, tokens - first)
            rows = -(-count // COLUMNS) * COLUMNS
            load(inputs[:rows], x, layouts[0], first, count, dim)
            z[:rows] = 0
            add_product(z[:rows], inputs[:rows], weights[program % len(weights)])
            if len(totals):
                load(labels[:rows], y, layouts[1], first, count, dim)
                for t in range(rows):
                    z1, z2, v = z[t, :columns], z[t, columns:], labels[t]
                    p1, p2 = p[t, :columns], p[t, columns:]
                    for i in range(columns):
                        p1[i] = sigmoid(z2[i])
                    for i in range(columns):
                        p2[i] = v[i] * z1[i] * (p1[i] + z2[i] * p1[i] * (one - p1[i]))
                    for i in range(columns):
                        p1[i] *= z2[i] * v[i]
                add_product(totals[number], inputs[:rows].T, p[:rows])
            else:
                for t in range(count):
                    at = layouts[1, 0] + (first + t) * layouts[1, 1]
                    row, z1, z2 = y[at : at + dim], z[t, :columns], z[t, columns:]
                    for i in range(dim):
                        row[i] = z1[i] * (z2[i] * sigmoid(z2[i]))


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Computes `reference.forward`."""
    q, k, v, w1, w2, scale, damping = args
    batch, tokens, heads, dim = q.shape
    rest, parts, state = _numba.padded(dim) - dim, -(-tokens // _PART), state_dtype(q.dtype)
    o = q.new_empty(q.shape, dtype=state)
    w = torch.stack((w1.detach(), w2.detach()), -2)
    w = F.pad(w, (0, rest, 0, 0, 0, rest)).flatten(-2)  # (H, d', 2d')
    totals, stepped = (w.new_zeros((batch * heads, *n, *w.shape[1:])) for n in ((parts,), ()))
    if batch:
        rows, strides = _numba.flat(k, v, q, o, dtype=state, lead=3)
        shape, programs, work = (tokens, heads, parts, dim), batch * heads * parts, q.numel() * dim
        weights, sums, after = w.numpy(), totals.flatten(0, 1).numpy(), stepped.numpy()
        parallel(_run, programs, 4 * work, shape, strides[:2], *rows[:2], weights, sums)
        factor = sums.dtype.type(-scale / tokens)
        _numba.take_step(factor, damping, totals.numpy(), weights, after)
        parallel(_run, programs, 2 * work, shape, strides[2:], *rows[2:], after, sums[:0])
    g = totals[:, 0].unflatten(-1, (2, -1))[:, :dim, :, :dim].flatten(-2)
    return o.to(q.dtype), g.unflatten(0, (batch, heads)).contiguous()
