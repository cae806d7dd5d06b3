"""Forward pass of TTT-linear's numba kernels: README.md's maths, a chunk at a time."""

import numpy as np

from .._numba import add_product, inlined, jit, load, rounded_to_bf16, store
from ._numba_parts import (
    ETA,
    OUT,
    K,
    Q,
    V,
    advance,
    copy,
    decay,
    fill,
    find,
    inner_gradient,
    new_chunk,
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
def forward(start, stop, sizes, numbers, rounds, segment, tokens, parameters, kept, o):
    """Runs the programs from `start` to `stop`.

    Args:
        rounds: Whether Z is rounded to bf16.
        segment: Tokens between two states that are kept.
        o: Memory of the output as one row.
    """
    dim, rows, columns, size = sizes.dim, sizes.rows, sizes.columns, sizes.size
    kind = parameters.states.dtype
    chunk = new_chunk(sizes, kind)
    z, queries = chunk.z, chunk.kq[rows:]
    sums = np.zeros((1, columns), kind)
    state = np.zeros((columns + 1, columns), kind)
    places = np.zeros((len(tokens.strides), 2), np.int64)
    for number in range(start, stop):
        image, scan, head = find(places, number, sizes, parameters.reverse, tokens.strides)
        # Everything, padding included: a NaN left by the previous program would spread, as 0 · NaN.
        copy(state, parameters.states[scan, head], columns + 1, columns)
        tau, vector = parameters.token_scale[scan], parameters.vectors[scan, head]
        for first in range(0, sizes.tokens, size):
            count = min(size, sizes.tokens - first)
            load(chunk.kq[:rows], tokens.k, places[K], first, count, dim)
            load(queries, tokens.q, places[Q], first, count, dim)
            load(chunk.v, tokens.v, places[V], first, count, dim)
            steps(chunk.step, tokens.eta, places[ETA], first, count)
            fill(z, state[-1])
            add_product(z, chunk.kq, state[:-1])
            if rounds:
                _round(z, count, dim)
            if len(kept.z):
                store(z, kept.z, places[OUT], first, count, dim)
            normalize(z[:rows], chunk.rstd, numbers)
            inner_gradient(chunk, vector, count, numbers)
            scores_of(chunk, tau, numbers.one)
            add_product(z[rows:], chunk.m, chunk.inner)
            decay(chunk, tau[-1])
            advance(state, chunk, sums)
            normalize(z[rows:], chunk.rstd, numbers)
            _outputs(z[rows:], queries, vector, dim)
            store(z[rows:], o, places[OUT], first, count, dim)
            n, end = first // segment, first + size
            if n < kept.w.shape[3] and (end == (n + 1) * segment or end >= sizes.tokens):
                copy(kept.w[image, scan, head, n], state, dim, dim)
                copy(kept.c[image, scan, head, n : n + 1], state[-1:], 1, dim)
