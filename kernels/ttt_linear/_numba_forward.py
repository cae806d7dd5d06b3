"""Forward pass of TTT-linear's numba kernels: README.md's maths, a chunk at a time."""

import numpy as np

from .._numba import (
    add_product,
    inlined,
    jit,
    load,
    rounded_to_bf16,
    store,
)
from ._numba_parts import (
    advance,
    copy,
    decay,
    fill,
    find,
    inner_gradient,
    normalize,
    scores_of,
    steps,
)


@inlined
def _round(z, count, dim):
    """Rounds Z to bf16, as it is saved for the backward pass."""
    for t in range(count):
        row = z[t]
        for i in range(dim):
            row[i] = rounded_to_bf16(row[i])


@inlined
def _outputs(x, queries, vectors, dim):
    """Overwrites the queries' rows X by Q + γX + λ."""
    gain, shift = vectors[0], vectors[1]
    for t in range(len(x)):
        row, query = x[t], queries[t]
        for i in range(dim):
            row[i] = query[i] + (gain[i] * row[i] + shift[i])


@jit
def forward(
    start, stop, sizes, reverse, numbers, rounds, segment,
    q, k, v, eta, states, vectors, token_scale, strides, o, z_kept, w_kept, c_kept,
):  # fmt: skip
    """Runs the programs from `start` to `stop`."""
    tokens, _, _, size, dim, rows, columns = sizes
    kind = states.dtype
    kq = np.zeros((2 * rows, columns), kind)
    keys, queries = kq[:rows], kq[rows:]
    z = np.zeros((2 * rows, columns), kind)
    scores, m = np.zeros((rows, rows), kind), np.zeros((rows, rows), kind)
    inner, decayed = np.zeros((rows, columns), kind), np.zeros((rows, columns), kind)
    values, sums = np.zeros((rows, columns), kind), np.zeros((1, columns), kind)
    step, rstd = np.zeros(rows, kind), np.zeros(2 * rows, kind)
    state = np.zeros((columns + 1, columns), kind)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, scan, head = find(places, number, sizes, reverse, strides)
        # Everything, padding included: a NaN left by the previous program would spread, as 0 · NaN.
        copy(state, states[scan, head], columns + 1, columns)
        tau, vector = token_scale[scan], vectors[scan, head]
        for first in range(0, tokens, size):
            count = min(size, tokens - first)
            load(keys, k, places[1], first, count, dim)
            load(queries, q, places[0], first, count, dim)
            load(values, v, places[2], first, count, dim)
            steps(step, eta, places[3], first, count)
            fill(z, state[-1])
            add_product(z, kq, state[:-1])
            if rounds:
                _round(z, count, dim)
            if len(z_kept):
                store(z, z_kept, places[4], first, count, dim)
            normalize(z[:rows], rstd, numbers)
            inner_gradient(inner, z, keys, values, vector, rstd, count, numbers)
            scores_of(scores, m, queries, keys, tau, step, numbers[3])
            add_product(z[rows:], m, inner)
            decay(decayed, inner, step, tau[-1])
            advance(state, keys, decayed, sums)
            normalize(z[rows:], rstd, numbers)
            _outputs(z[rows:], queries, vector, dim)
            store(z[rows:], o, places[4], first, count, dim)
            n, end = first // segment, first + size
            if n < w_kept.shape[3] and (end == (n + 1) * segment or end >= tokens):
                copy(w_kept[image, scan, head, n], state, dim, dim)
                copy(c_kept[image, scan, head, n : n + 1], state[-1:], 1, dim)
