"""TTT-linear's numba kernels: README.md's maths, a chunk at a time.

A chunk's matrices are `(b', d')`, multiples of COLUMNS, with zeros below the chunk's `count` tokens
and right of its `dim` features. `sums` has rows to sum a chunk in. Whole matrices are copied by
`np.positive`, which numba vectorizes, unlike an assignment.
"""

from typing import NamedTuple

import numpy as np

from .._numba import (
    COLUMNS,
    add_filtered,
    add_product,
    inlined,
    jit,
    load,
    round_to_bf16,
    spread,
    store,
)

# Rows of `places` and of `Tokens.strides`; outputs and their gradients lie like OUT.
Q, K, V, ETA, OUT, DETA = range(6)


class Sizes(NamedTuple):
    """Numbers of tokens, scans and heads; of a chunk its tokens and features, and both padded."""

    tokens: int
    scans: int
    heads: int
    size: int
    dim: int
    rows: int
    columns: int


class Numbers(NamedTuple):
    """d, and in the type of the state 1/d, ε and 1."""

    dim: int
    inverse: float
    eps: float
    one: float


class Tokens(NamedTuple):
    """Memory of the tokens and inner learning rates as rows, and the strides of each."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    eta: np.ndarray
    strides: np.ndarray


class Parameters(NamedTuple):
    """Directions, initial W and b, rows γ and λ, and τ of each scan.

    `filters`: `(2, R, K, H·d)` of the queries and keys, which share tokens then, or K = 0.
    """

    reverse: np.ndarray
    w0: np.ndarray
    b0: np.ndarray
    vectors: np.ndarray
    token_scale: np.ndarray
    filters: np.ndarray


class Kept(NamedTuple):
    """Z of every token, and W and c at the end of every segment."""

    z: np.ndarray
    w: np.ndarray
    c: np.ndarray


class Gradients(NamedTuple):
    """Memory of the gradients of the tokens as rows, and gradients of each image's parameters."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    deta: np.ndarray
    dstates: np.ndarray
    dvectors: np.ndarray
    dscale: np.ndarray


class Chunk(NamedTuple):
    """Matrices of the tokens of one chunk.

    Attributes:
        kq: Keys, and below them queries.
        v: Values.
        z: Z, and below it QW + c − MG; normalised in place.
        inner: G, the inner gradients.
        decayed: −e⊙G.
        scores: QKᵀ + 1.
        m: −M = −E⊙(QKᵀ + 1).
        step: Inner learning rates.
        rstd: 1/σ of the rows of z.
    """

    kq: np.ndarray
    v: np.ndarray
    z: np.ndarray
    inner: np.ndarray
    decayed: np.ndarray
    scores: np.ndarray
    m: np.ndarray
    step: np.ndarray
    rstd: np.ndarray


@inlined
def new_chunk(sizes, kind):
    rows, columns = sizes.rows, sizes.columns
    return Chunk(
        np.zeros((2 * rows, columns), kind),
        np.zeros((rows, columns), kind),
        np.zeros((2 * rows, columns), kind),
        np.zeros((rows, columns), kind),
        np.zeros((rows, columns), kind),
        np.zeros((rows, rows), kind),
        np.zeros((rows, rows), kind),
        np.zeros(rows, kind),
        np.zeros(2 * rows, kind),
    )


@inlined
def find(places, number, sizes, reverse, strides):
    """Image, scan and head of a program; offset of its first token and stride to the next.

    Fills a row of `places` for each row of `strides` (of images, tokens, scans and heads).
    """
    scans, heads = sizes.scans, sizes.heads
    image, scan, head = number // (scans * heads), number // heads % scans, number % heads
    for i in range(len(strides)):
        step = strides[i, 1]
        start = image * strides[i, 0] + scan * strides[i, 2] + head * strides[i, 3]
        if reverse[scan]:
            start, step = start + (sizes.tokens - 1) * step, -step
        places[i, 0], places[i, 1] = start, step
    return image, scan, head


@inlined
def start_state(state, w, b, dim):
    """The first [W; c], without the mean over the outputs, as in the reference."""
    # Everything, padding included: a NaN left by the previous program would spread, as 0 · NaN.
    state[:] = 0
    for i in range(dim + 1):
        row, line = (state[i], w[i]) if i < dim else (state[-1], b)
        mean = line.mean()
        for j in range(dim):
            row[j] = line[j] - mean


@inlined
def load_filtered(chunk, line, filters, x, place, first, count, size, dim):
    """Queries and keys of a chunk of filtered tokens; `filters` are `(2, K, d')`.

    `line` has K − 1 rows for the tokens before the chunk, and below them those of the chunk.
    """
    rows, reach = len(chunk.v), filters.shape[1] - 1
    for t in range(reach):
        row, later = line[t], line[size + t]
        for i in range(len(row)):
            row[i] = later[i] if first else 0
    load(line[reach:], x, place, first, count, dim)
    chunk.kq[:] = 0
    add_filtered(chunk.kq[rows:], line, filters[0])
    add_filtered(chunk.kq[:rows], line, filters[1])
    chunk.kq[count:rows] = 0


@inlined
def normalize(z, rstd, numbers):
    """Normalises rows z to (z − mean)/σ, and writes 1/σ to `rstd`."""
    dim, inverse, eps, one = numbers
    for t in range(len(z)):
        x = z[t]
        total, squares = one - one, one - one
        for i in range(dim):
            total += x[i]
        mean = total * inverse
        for i in range(dim):
            x[i] -= mean
            squares += x[i] * x[i]
        scale = one / np.sqrt(squares * inverse + eps)
        for i in range(dim):
            x[i] *= scale
        rstd[t] = scale


@inlined
def inner_gradient(chunk, vectors, count, numbers):
    """G = Π(γY), Y = γX + λ − (V − K), from the normalised Z; zeros in the padding."""
    dim, inverse, _, one = numbers
    gain, shift = vectors[0], vectors[1]
    for t in range(count):
        p, normed, key, value = chunk.inner[t], chunk.z[t], chunk.kq[t], chunk.v[t]
        mean, along = one - one, one - one
        for i in range(dim):
            p[i] = gain[i] * (gain[i] * normed[i] + shift[i] - (value[i] - key[i]))
            mean += p[i]
            along += p[i] * normed[i]
        mean, along, scale = mean * inverse, along * inverse, chunk.rstd[t]
        for i in range(dim):
            p[i] = (p[i] - mean - normed[i] * along) * scale
    for t in range(count, len(chunk.inner)):
        chunk.inner[t] = 0


@inlined
def add_lower_products(z, x, y):
    """z += x @ y.T on and below the diagonal, four sums at a time."""
    for t in range(len(x)):
        total, row = z[t], x[t]
        for s in range(0, t + 1, 4):
            y0, y1, y2, y3 = y[s], y[s + 1], y[s + 2], y[s + 3]
            sum0, sum1, sum2, sum3 = total[s], total[s + 1], total[s + 2], total[s + 3]
            for i in range(len(row)):
                sum0 += row[i] * y0[i]
                sum1 += row[i] * y1[i]
                sum2 += row[i] * y2[i]
                sum3 += row[i] * y3[i]
            total[s], total[s + 1], total[s + 2], total[s + 3] = sum0, sum1, sum2, sum3


@inlined
def scores_of(chunk, tau, one):
    """QKᵀ + 1, and −M = −E⊙(QKᵀ + 1)."""
    scores, m, step, rows, zero = chunk.scores, chunk.m, chunk.step, len(chunk.m), one - one
    scores[:] = one
    add_lower_products(scores, chunk.kq[rows:], chunk.kq[:rows])
    for t in range(rows):
        row, score = m[t], scores[t]
        reach = tau[min(t, len(tau) - 1)]
        # Blocks of a length that the compiler knows become vectors.
        for first in range(0, rows, COLUMNS):
            for s in range(first, first + COLUMNS):
                row[s] = -score[s] * (reach * step[s]) if s <= t else zero


@inlined
def decay(chunk, last):
    """−e⊙G."""
    for t in range(len(chunk.decayed)):
        e = -last * chunk.step[t]
        row, line = chunk.decayed[t], chunk.inner[t]
        for i in range(len(row)):
            row[i] = e * line[i]


@inlined
def sum_rows(total, x):
    """Sums one chunk, so that the sum over all chunks rounds once a chunk, not once a token."""
    total[:] = 0
    for t in range(len(x)):
        row = x[t]
        for i in range(len(row)):
            total[i] += row[i]


@inlined
def advance(state, chunk, sums):
    """[W; c] of the next chunk: W' = W − (e⊙K)ᵀG, c' = c − eᵀG; `sums` is one row."""
    add_product(state[:-1], chunk.kq[: len(chunk.decayed)].T, chunk.decayed)
    sum_rows(sums[0], chunk.decayed)
    state[-1] += sums[0]


# ------------------------------------------------------------------------------------------ forward


@inlined
def _outputs(x, queries, vectors, dim):
    """Overwrites the queries' rows X by Q + γX + λ."""
    gain, shift = vectors[0], vectors[1]
    for t in range(len(x)):
        row, query = x[t], queries[t]
        for i in range(dim):
            row[i] = query[i] + (gain[i] * row[i] + shift[i])


@jit
def forward(team, sizes, numbers, rounds, segment, tokens, parameters, kept, o):
    """Runs the programs of a team; `segment` tokens are between two states kept."""
    dim, rows, columns, size = sizes.dim, sizes.rows, sizes.columns, sizes.size
    kind = parameters.w0.dtype
    chunk = new_chunk(sizes, kind)
    z, queries = chunk.z, chunk.kq[rows:]
    sums = np.zeros((1, columns), kind)
    state = np.zeros((columns + 1, columns), kind)
    places = np.zeros((len(tokens.strides), 2), np.int64)
    taps = parameters.filters.shape[2]
    filters = np.zeros((2, taps, columns), kind)
    line = np.zeros((rows + taps, columns), kind)
    start, stop = spread(team, (sizes, numbers, rounds, segment, tokens, parameters, kept, o))
    for number in range(start, stop):
        image, scan, head = find(places, number, sizes, parameters.reverse, tokens.strides)
        filters[:, :, :dim] = parameters.filters[:, scan, :, head * dim : (head + 1) * dim]
        start_state(state, parameters.w0[scan, head], parameters.b0[scan, head], dim)
        tau, vector = parameters.token_scale[scan], parameters.vectors[scan, head]
        for first in range(0, sizes.tokens, size):
            count = min(size, sizes.tokens - first)
            if taps:
                load_filtered(chunk, line, filters, tokens.q, places[Q], first, count, size, dim)
            else:
                load(chunk.kq[:rows], tokens.k, places[K], first, count, dim)
                load(queries, tokens.q, places[Q], first, count, dim)
            load(chunk.v, tokens.v, places[V], first, count, dim)
            load(chunk.step.reshape(-1, 1), tokens.eta, places[ETA], first, count, 1)
            np.positive(state[-1], z)
            add_product(z, chunk.kq, state[:-1])
            if rounds:
                round_to_bf16(z, count, dim)
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
                kept.w[image, scan, head, n] = state[:dim, :dim]
                kept.c[image, scan, head, n] = state[-1, :dim]


# ----------------------------------------------------------------------------------------- backward


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
    d[count:] = 0


@inlined
def _weights_gradient(s, scores, tau, step, dtau, dstep, one):
    """Turns S = DGᵀ into −E⊙S, below the diagonal, and adds dE's part to dℓ and dτ."""
    zero = one - one
    dstep[:] = 0
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
    dz[count:] = 0


@inlined
def _load(chunk, tokens, kept, places, first, sizes):
    """Keys, values, Z and learning rates of a chunk; returns the number of its tokens."""
    rows, dim, count = sizes.rows, sizes.dim, min(sizes.size, sizes.tokens - first)
    load(chunk.kq[:rows], tokens.k, places[K], first, count, dim)
    load(chunk.v, tokens.v, places[V], first, count, dim)
    load(chunk.z[:rows], kept.z, places[OUT], first, count, dim)
    load(chunk.step.reshape(-1, 1), tokens.eta, places[ETA], first, count, 1)
    return count


@inlined
def _walk(
    walked, state, chunk, sums, tokens, kept, vectors, places, begin, last, sizes, scale, numbers
):
    """The states before the chunks from `begin` to `last`; `state` is the first one's."""
    np.positive(state, walked[0])
    for n in range(begin, last):
        count = _load(chunk, tokens, kept, places, n * sizes.size, sizes)
        normalize(chunk.z[: sizes.rows], chunk.rstd, numbers)
        inner_gradient(chunk, vectors, count, numbers)
        decay(chunk, scale)
        advance(state, chunk, sums)
        np.positive(state, walked[n + 1 - begin])


@jit
def backward(team, sizes, numbers, segment, do, tokens, parameters, kept, grads):
    """Runs the programs of a team; `segment` chunks are between two states kept."""
    dim, rows, columns, size = sizes.dim, sizes.rows, sizes.columns, sizes.size
    kind = parameters.w0.dtype
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
    start, stop = spread(team, (sizes, numbers, segment, do, tokens, parameters, kept, grads))
    for number in range(start, stop):
        image, scan, head = find(places, number, sizes, parameters.reverse, tokens.strides)
        tau, vector = parameters.token_scale[scan], parameters.vectors[scan, head]
        dtau = grads.dscale[image, scan, head]
        dstate, dvector = grads.dstates[image, scan, head], grads.dvectors[image, scan, head]
        dw, dc = dstate[:-1], dstate[-1]
        for n in range(chunks - 1, -1, -1):
            begin = n // segment * segment
            if n + 1 == min(begin + segment, chunks):
                start_state(state, parameters.w0[scan, head], parameters.b0[scan, head], dim)
                if begin:
                    last = begin // segment - 1
                    state[:dim, :dim] = kept.w[image, scan, head, last]
                    state[-1, :dim] = kept.c[image, scan, head, last]
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
            np.positive(at[-1], z[rows:])
            add_product(z[rows:], queries, at[:-1])
            add_product(z[rows:], chunk.m, chunk.inner)
            normalize(z[rows:], chunk.rstd[rows:], numbers)

            # The query side.
            np.positive(grad, dkq[rows:])
            dkq[:rows] = 0
            sums[:] = 0
            _query_gradient(d, z[rows:], grad, vector, sums, chunk.rstd[rows:], count, numbers)
            s[:] = 0
            add_lower_products(s, d, chunk.inner)
            _weights_gradient(s, chunk.scores, tau, chunk.step, dtau, dstep, numbers.one)
            add_product(dkq[rows:], s, keys)
            add_product(dkq[:rows], s.T, queries)
            u[:] = 0
            add_product(u, chunk.m.T, d)

            # The key side: back through the inner gradient and the inner model.
            np.positive(dc, h)
            add_product(h, keys, dw)
            decay(chunk, tau[-1])
            _key_gradient(dz, u, h, dkq, chunk, vector, sums, tau, dtau, dstep, count, numbers)

            # Through the state: dQ += DWᵀ, dK += dZWᵀ − e⊙(GdW'ᵀ).
            add_product(dkq, dzd, np.ascontiguousarray(at[:-1].T))
            add_product(dkq[:rows], chunk.decayed, np.ascontiguousarray(dw.T))
            store(dkq[:rows], grads.dk, places[OUT], first, count, dim)
            store(dkq[rows:], grads.dq, places[OUT], first, count, dim)
            store(chunk.v, grads.dv, places[OUT], first, count, dim)
            store(dstep.reshape(-1, 1), grads.deta, places[DETA], first, count, 1)
            add_product(dw, chunk.kq.T, dzd)
            sum_rows(sums[2], dzd)
            dvector += sums[:2]
            dc += sums[2]
