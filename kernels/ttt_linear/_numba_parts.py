"""Functions that both passes of TTT-linear's numba kernels share: tokens, states, scores.

A chunk's matrices are `(b', d')`, multiples of COLUMNS, with zeros below the chunk's `count` tokens
and right of its `dim` features. `sums` has rows to sum a chunk in.
"""

from typing import NamedTuple

import numpy as np

from .._numba import COLUMNS, add, add_product, clear, inlined

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
    """Directions, initial [W; b], rows γ and λ, and τ of each scan."""

    reverse: np.ndarray
    states: np.ndarray
    vectors: np.ndarray
    token_scale: np.ndarray


class Kept(NamedTuple):
    """Z of every token, and W and c at the end of every segment."""

    z: np.ndarray
    w: np.ndarray
    c: np.ndarray


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
def copy(to, x, rows, columns):
    """Copies the corner of a matrix."""
    for i in range(rows):
        row, line = to[i], x[i]
        for j in range(columns):
            row[j] = line[j]


@inlined
def fill(x, row):
    """Sets every row of `x` to `row`."""
    for t in range(len(x)):
        line = x[t]
        for i in range(len(row)):
            line[i] = row[i]


@inlined
def steps(step, eta, place, first, count):
    """Loads the tokens' steps; zero for padding."""
    for t in range(count):
        step[t] = eta[place[0] + (first + t) * place[1]]
    for t in range(count, len(step)):
        step[t] = 0


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
    clear(chunk.inner, count)


@inlined
def scores_of(chunk, tau, one):
    """QKᵀ + 1, and −M = −E⊙(QKᵀ + 1)."""
    scores, m, step, rows, zero = chunk.scores, chunk.m, chunk.step, len(chunk.m), one - one
    for t in range(rows):
        score = scores[t]
        for s in range(len(score)):
            score[s] = one
    add_product(scores, chunk.kq[rows:], chunk.kq[:rows].T)
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
    for i in range(len(total)):
        total[i] = 0
    for t in range(len(x)):
        row = x[t]
        for i in range(len(row)):
            total[i] += row[i]


@inlined
def advance(state, chunk, sums):
    """[W; c] of the next chunk: W' = W − (e⊙K)ᵀG, c' = c − eᵀG; `sums` is one row."""
    add_product(state[:-1], chunk.kq[: len(chunk.decayed)].T, chunk.decayed)
    sum_rows(sums[0], chunk.decayed)
    add(state[-1:], sums)
