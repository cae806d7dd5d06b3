"""Backward pass of TTT-linear's numba kernels: README.md's maths, a chunk at a time."""

import numpy as np

from .._numba import COLUMNS, add, add_product, clear, inlined, jit, load, store
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
    sum_rows,
)


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
def _key_gradient(
    dz, u, h, inner, x, values, keys, vectors, sums, tau, step, rstd, dtau, dstep, dkeys, count,
    numbers,
):  # fmt: skip
    """Computes dZ and dY from U's query side and H = KdW' + dc', and adds their parts.

    Overwrites U by dP, and V by dV = −dY.
    """
    dim, inverse, _, one = numbers
    gain, shift, dgain, dshift = vectors[0], vectors[1], sums[0], sums[1]
    last, zero = tau[-1], one - one
    dlast = zero
    for t in range(count):
        dp, normed, g, back, y, key = u[t], x[t], inner[t], h[t], values[t], keys[t]
        row, dkey, scale, e = dz[t], dkeys[t], rstd[t], last * step[t]
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
        dlast += step[t] * de
    dtau[-1] += dlast
    clear(dz, count)


@inlined
def _walk(
    walked, state, decayed, keys, values, x, inner, rstd, step, sums, k, v, z, eta, vectors, places,
    begin, last, sizes, scale, numbers,
):  # fmt: skip
    """The states before the chunks from `begin` to `last`; `state` is the first one's."""
    tokens, _, _, size, dim, _, columns = sizes
    copy(walked[0], state, columns + 1, columns)
    for n in range(begin, last):
        first = n * size
        count = min(size, tokens - first)
        load(keys, k, places[1], first, count, dim)
        load(values, v, places[2], first, count, dim)
        load(x, z, places[4], first, count, dim)
        steps(step, eta, places[3], first, count)
        normalize(x, rstd, numbers)
        inner_gradient(inner, x, keys, values, vectors, rstd, count, numbers)
        decay(decayed, inner, step, scale)
        advance(state, keys, decayed, sums)
        copy(walked[n + 1 - begin], state, columns + 1, columns)


@jit
def backward(
    start, stop, sizes, reverse, numbers, segment,
    do, q, k, v, eta, z_kept, states, vectors, token_scale, strides, w_kept, c_kept,
    dq, dk, dv, deta, dstates, dvectors, dscale,
):  # fmt: skip
    """Runs the programs from `start` to `stop`."""
    tokens, _, _, size, dim, rows, columns = sizes
    kind = states.dtype
    chunks = -(-tokens // size)
    walked = np.zeros((min(segment, chunks), columns + 1, columns), kind)
    state = np.zeros((columns + 1, columns), kind)
    # Rows of the keys are above rows of the queries: K and Q, Z and Z̄, dZ and D, dK and dQ.
    kq, z = np.zeros((2 * rows, columns), kind), np.zeros((2 * rows, columns), kind)
    dzd, dkq = np.zeros((2 * rows, columns), kind), np.zeros((2 * rows, columns), kind)
    keys, queries, dz, d = kq[:rows], kq[rows:], dzd[:rows], dzd[rows:]
    grad, inner = np.zeros((rows, columns), kind), np.zeros((rows, columns), kind)
    decayed, values = np.zeros((rows, columns), kind), np.zeros((rows, columns), kind)
    u, h = np.zeros((rows, columns), kind), np.zeros((rows, columns), kind)
    scores, m = np.zeros((rows, rows), kind), np.zeros((rows, rows), kind)
    s = np.zeros((rows, rows), kind)
    step, dstep, rstd = np.zeros(rows, kind), np.zeros(rows, kind), np.zeros(2 * rows, kind)
    # A chunk's dγ and dλ, and its addition to c or dc.
    sums = np.zeros((3, columns), kind)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, scan, head = find(places, number, sizes, reverse, strides)
        tau, vector, dtau = token_scale[scan], vectors[scan, head], dscale[image, scan, head]
        dstate, dvector = dstates[image, scan, head], dvectors[image, scan, head]
        dw, dc = dstate[:-1], dstate[-1]
        for n in range(chunks - 1, -1, -1):
            begin = n // segment * segment
            if n + 1 == min(begin + segment, chunks):
                # Everything, padding included: a NaN left by the previous program would spread, as
                # 0 · NaN.
                copy(state, states[scan, head], columns + 1, columns)
                if begin:
                    kept = begin // segment - 1
                    copy(state, w_kept[image, scan, head, kept], dim, dim)
                    copy(state[-1:], c_kept[image, scan, head, kept : kept + 1], 1, dim)
                _walk(
                    walked, state, decayed, keys, values, z[:rows], inner, rstd, step, sums[2:], k,
                    v, z_kept, eta, vector, places, begin, n, sizes, tau[-1], numbers,
                )  # fmt: skip
            first, at = n * size, walked[n - begin]
            count = min(size, tokens - first)
            load(keys, k, places[1], first, count, dim)
            load(queries, q, places[0], first, count, dim)
            load(values, v, places[2], first, count, dim)
            load(z[:rows], z_kept, places[4], first, count, dim)
            load(grad, do, places[4], first, count, dim)
            steps(step, eta, places[3], first, count)
            scores_of(scores, m, queries, keys, tau, step, numbers[3])
            normalize(z[:rows], rstd, numbers)
            inner_gradient(inner, z, keys, values, vector, rstd, count, numbers)
            fill(z[rows:], at[-1])
            add_product(z[rows:], queries, at[:-1])
            add_product(z[rows:], m, inner)
            normalize(z[rows:], rstd[rows:], numbers)

            # The query side.
            copy(dkq[rows:], grad, rows, columns)
            clear(dkq[:rows], 0)
            clear(sums, 0)
            _query_gradient(d, z[rows:], grad, vector, sums, rstd[rows:], count, numbers)
            clear(s, 0)
            add_product(s, d, inner.T)
            _weights_gradient(s, scores, tau, step, dtau, dstep, numbers[3])
            add_product(dkq[rows:], s, keys)
            add_product(dkq[:rows], s.T, queries)
            clear(u, 0)
            add_product(u, m.T, d)

            # The key side: back through the inner gradient and the inner model.
            fill(h, dc)
            add_product(h, keys, dw)
            decay(decayed, inner, step, tau[-1])
            _key_gradient(
                dz, u, h, inner, z, values, keys, vector, sums, tau, step, rstd, dtau, dstep,
                dkq, count, numbers,
            )  # fmt: skip

            # Through the state: dQ += DWᵀ, dK += dZWᵀ − e⊙(GdW'ᵀ).
            add_product(dkq, dzd, at[:-1].T)
            add_product(dkq[:rows], decayed, dw.T)
            store(dkq[:rows], dk, places[4], first, count, dim)
            store(dkq[rows:], dq, places[4], first, count, dim)
            store(values, dv, places[4], first, count, dim)
            for t in range(count):
                deta[places[5, 0] + (first + t) * places[5, 1]] = dstep[t]
            add_product(dw, kq.T, dzd)
            sum_rows(sums[2], dzd)
            add(dvector, sums[:2])
            add(dstate[-1:], sums[2:])
