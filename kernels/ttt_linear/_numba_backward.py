"""Backward pass of TTT-linear's numba kernels: README.md's maths, a chunk at a time."""

from typing import NamedTuple

import numpy as np

from .._numba import COLUMNS, add, add_product, clear, inlined, jit, load, store
from ._numba_parts import (
    DETA,
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
    sum_rows,
)


class Gradients(NamedTuple):
    """Memory of the gradients of the tokens as rows, and gradients of each image's parameters."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    deta: np.ndarray
    dstates: np.ndarray
    dvectors: np.ndarray
    dscale: np.ndarray


@inlined
def _query_gradient(d, x, do, vectors, sums, rstd, count, numbers):
    """D = Π(γ·dO), and the output's part of dγ and dλ; zeros in the padding."""
    dim, inverse, _, one = numbers
    gain, dgain, dshift = vectors[0], sums[0], sums[1]
    for t in range(count):
        row, normed, grad = d[t], x[t], do[t]
        mean, along, scale = one - one, one - one, rstd[t]
        for i in range(dim):
            dgain[i] += grad[i] * normed[i]
        for i in range(dim):
            dshift[i] += grad[i]
        for i in range(dim):
            row[i] = gain[i] * grad[i]
            mean += row[i]
            along += row[i] * normed[i]
        mean, along = mean * inverse, along * inverse
        for i in range(dim):
            row[i] = (row[i] - mean - normed[i] * along) * scale
    clear(d, count)


@inlined
def _weights_gradient(s, scores, tau, step, dtau, dstep, one):
    """Turns S = DGᵀ into −E⊙S, below the diagonal, and adds dE's part to dℓ and dτ."""
    zero = one - one
    for i in range(len(dstep)):
        dstep[i] = zero
    for t in range(len(s)):
        row, score = s[t], scores[t]
        at = min(t, len(tau) - 1)
        reach, total = tau[at], zero
        for first in range(0, len(s), COLUMNS):
            for i in range(first, first + COLUMNS):
                x = -row[i] if i <= t else zero
                de = x * score[i] if i <= t else zero
                row[i] = x * (reach * step[i]) if i <= t else zero
                dstep[i] += reach * de
                total += step[i] * de
        dtau[at] += total


@inlined
def _key_gradient(dz, u, h, dkeys, chunk, vectors, sums, tau, dtau, dstep, count, numbers):
    """Computes dZ and dY from U's query side and H = KdW' + dc', and adds their parts.

    Overwrites U by dP, and the chunk's values by dV = −dY.
    """
    dim, inverse, _, one = numbers
    gain, shift, dgain, dshift = vectors[0], vectors[1], sums[0], sums[1]
    last, zero = tau[-1], one - one
    dlast = zero
    for t in range(count):
        dp, normed, g, back = u[t], chunk.z[t], chunk.inner[t], h[t]
        y, key, row, dkey = chunk.v[t], chunk.kq[t], dz[t], dkeys[t]
        scale, e = chunk.rstd[t], last * chunk.step[t]
        de, mean, along, with_p, with_g = zero, zero, zero, zero, zero
        for i in range(dim):
            y[i] = gain[i] * normed[i] + shift[i] - (y[i] - key[i])
            with_p += gain[i] * y[i] * normed[i]
        for i in range(dim):
            de -= back[i] * g[i]
            dp[i] -= e * back[i]
            mean += dp[i]
            along += dp[i] * normed[i]
            with_g += dp[i] * g[i]
        mean, along = mean * inverse, along * inverse
        mean_dx, along_dx = zero, zero
        for i in range(dim):
            dp[i] = (dp[i] - mean - normed[i] * along) * scale
            dx = gain[i] * gain[i] * dp[i]
            mean_dx += dx
            along_dx += dx * normed[i]
        mean_dx, along_dx, along = mean_dx * inverse, along_dx * inverse, along * scale
        with_p, with_g = with_p * inverse * scale, with_g * inverse * scale
        for i in range(dim):
            dx = (gain[i] * gain[i] * dp[i] - mean_dx - normed[i] * along_dx) * scale
            row[i] = dx - with_p * dp[i] - along * g[i] - with_g * normed[i]
        for i in range(dim):
            dgain[i] += dp[i] * (y[i] + gain[i] * normed[i])
        for i in range(dim):
            y[i] = -gain[i] * dp[i]
        for i in range(dim):
            dshift[i] -= y[i]
        for i in range(dim):
            dkey[i] -= y[i]
        dstep[t] += last * de
        dlast += chunk.step[t] * de
    dtau[-1] += dlast
    clear(dz, count)


@inlined
def _load(chunk, tokens, kept, places, first, sizes):
    """Keys, values, Z and learning rates of a chunk; returns the number of its tokens."""
    rows, dim, count = sizes.rows, sizes.dim, min(sizes.size, sizes.tokens - first)
    load(chunk.kq[:rows], tokens.k, places[K], first, count, dim)
    load(chunk.v, tokens.v, places[V], first, count, dim)
    load(chunk.z[:rows], kept.z, places[OUT], first, count, dim)
    steps(chunk.step, tokens.eta, places[ETA], first, count)
    return count


@inlined
def _walk(
    walked, state, chunk, sums, tokens, kept, vectors, places, begin, last, sizes, scale, numbers
):
    """The states before the chunks from `begin` to `last`; `state` is the first one's."""
    columns = sizes.columns
    copy(walked[0], state, columns + 1, columns)
    for n in range(begin, last):
        count = _load(chunk, tokens, kept, places, n * sizes.size, sizes)
        normalize(chunk.z[: sizes.rows], chunk.rstd, numbers)
        inner_gradient(chunk, vectors, count, numbers)
        decay(chunk, scale)
        advance(state, chunk, sums)
        copy(walked[n + 1 - begin], state, columns + 1, columns)


@jit
def backward(start, stop, sizes, numbers, segment, do, tokens, parameters, kept, grads):
    """Runs the programs from `start` to `stop`.

    Args:
        segment: Chunks between two states that were kept.
        do: Memory of the output's gradient as one row.
    """
    dim, rows, columns, size = sizes.dim, sizes.rows, sizes.columns, sizes.size
    kind = parameters.states.dtype
    chunks = -(-sizes.tokens // size)
    walked = np.zeros((min(segment, chunks), columns + 1, columns), kind)
    state = np.zeros((columns + 1, columns), kind)
    chunk = new_chunk(sizes, kind)
    # Rows of the keys are above rows of the queries: Z and Z̄, dZ and D, dK and dQ.
    keys, queries, z = chunk.kq[:rows], chunk.kq[rows:], chunk.z
    dzd, dkq = np.zeros((2 * rows, columns), kind), np.zeros((2 * rows, columns), kind)
    dz, d = dzd[:rows], dzd[rows:]
    grad = np.zeros((rows, columns), kind)
    u, h = np.zeros((rows, columns), kind), np.zeros((rows, columns), kind)
    s = np.zeros((rows, rows), kind)
    dstep = np.zeros(rows, kind)
    # A chunk's dγ and dλ, and its addition to c or dc.
    sums = np.zeros((3, columns), kind)
    places = np.zeros((len(tokens.strides), 2), np.int64)
    for number in range(start, stop):
        image, scan, head = find(places, number, sizes, parameters.reverse, tokens.strides)
        tau, vector = parameters.token_scale[scan], parameters.vectors[scan, head]
        dtau = grads.dscale[image, scan, head]
        dstate, dvector = grads.dstates[image, scan, head], grads.dvectors[image, scan, head]
        dw, dc = dstate[:-1], dstate[-1]
        for n in range(chunks - 1, -1, -1):
            begin = n // segment * segment
            if n + 1 == min(begin + segment, chunks):
                # Everything, padding included: a NaN left by the previous program would spread, as
                # 0 · NaN.
                copy(state, parameters.states[scan, head], columns + 1, columns)
                if begin:
                    last = begin // segment - 1
                    copy(state, kept.w[image, scan, head, last], dim, dim)
                    copy(state[-1:], kept.c[image, scan, head, last : last + 1], 1, dim)
                _walk(
                    walked, state, chunk, sums[2:], tokens, kept, vector, places, begin, n, sizes,
                    tau[-1], numbers,
                )  # fmt: skip
            first, at = n * size, walked[n - begin]
            count = _load(chunk, tokens, kept, places, first, sizes)
            load(queries, tokens.q, places[Q], first, count, dim)
            load(grad, do, places[OUT], first, count, dim)
            scores_of(chunk, tau, numbers.one)
            normalize(z[:rows], chunk.rstd, numbers)
            inner_gradient(chunk, vector, count, numbers)
            fill(z[rows:], at[-1])
            add_product(z[rows:], queries, at[:-1])
            add_product(z[rows:], chunk.m, chunk.inner)
            normalize(z[rows:], chunk.rstd[rows:], numbers)

            # The query side.
            copy(dkq[rows:], grad, rows, columns)
            clear(dkq[:rows], 0)
            clear(sums, 0)
            _query_gradient(d, z[rows:], grad, vector, sums, chunk.rstd[rows:], count, numbers)
            clear(s, 0)
            add_product(s, d, chunk.inner.T)
            _weights_gradient(s, chunk.scores, tau, chunk.step, dtau, dstep, numbers.one)
            add_product(dkq[rows:], s, keys)
            add_product(dkq[:rows], s.T, queries)
            clear(u, 0)
            add_product(u, chunk.m.T, d)

            # The key side: back through the inner gradient and the inner model.
            fill(h, dc)
            add_product(h, keys, dw)
            decay(chunk, tau[-1])
            _key_gradient(dz, u, h, dkq, chunk, vector, sums, tau, dtau, dstep, count, numbers)

            # Through the state: dQ += DWᵀ, dK += dZWᵀ − e⊙(GdW'ᵀ).
            add_product(dkq, dzd, at[:-1].T)
            add_product(dkq[:rows], chunk.decayed, dw.T)
            store(dkq[:rows], grads.dk, places[OUT], first, count, dim)
            store(dkq[rows:], grads.dq, places[OUT], first, count, dim)
            store(chunk.v, grads.dv, places[OUT], first, count, dim)
            for t in range(count):
                grads.deta[places[DETA, 0] + (first + t) * places[DETA, 1]] = dstep[t]
            add_product(dw, chunk.kq.T, dzd)
            sum_rows(sums[2], dzd)
            add(dvector, sums[:2])
            add(dstate[-1:], sums[2:])
