"""Functions that both passes of TTT-linear's numba kernels share: tokens, states, scores.

A chunk's matrices are `(b', d')`, multiples of COLUMNS, with zeros below the chunk's `count` tokens
and right of its `dim` features. `numbers` are d, 1/d, ε and 1 in the state's type.
"""

import numpy as np

from .._numba import COLUMNS, add, add_product, clear, inlined


@inlined
def find(places, number, sizes, reverse, strides):
    """Image, scan and head of a program; offset of its first token and stride to the next.

    Fills a row of `places` for each row of `strides` (of images, tokens, scans and heads).
    """
    tokens, scans, heads = sizes[0], sizes[1], sizes[2]
    image, scan, head = number // (scans * heads), number // heads % scans, number % heads
    for i in range(len(strides)):
        step = strides[i, 1]
        start = image * strides[i, 0] + scan * strides[i, 2] + head * strides[i, 3]
        if reverse[scan]:
            start, step = start + (tokens - 1) * step, -step
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
def inner_gradient(inner, x, keys, values, vectors, rstd, count, numbers):
    """G = Π(γY), Y = γX + λ − (V − K), of every token; zeros in the padding."""
    dim, inverse, _, one = numbers
    gain, shift = vectors[0], vectors[1]
    for t in range(count):
        p, normed, key, value = inner[t], x[t], keys[t], values[t]
        mean, along = one - one, one - one
        for i in range(dim):
            p[i] = gain[i] * (gain[i] * normed[i] + shift[i] - (value[i] - key[i]))
            mean += p[i]
            along += p[i] * normed[i]
        mean, along, scale = mean * inverse, along * inverse, rstd[t]
        for i in range(dim):
            p[i] = (p[i] - mean - normed[i] * along) * scale
    clear(inner, count)


@inlined
def scores_of(scores, m, queries, keys, tau, step, one):
    """QKᵀ + 1, and −M = −E⊙(QKᵀ + 1)."""
    zero = one - one
    for t in range(len(scores)):
        score = scores[t]
        for s in range(len(score)):
            score[s] = one
    add_product(scores, queries, keys.T)
    for t in range(len(m)):
        row, score = m[t], scores[t]
        reach = tau[min(t, len(tau) - 1)]
        # Blocks of a length that the compiler knows become vectors.
        for first in range(0, len(m), COLUMNS):
            for s in range(first, first + COLUMNS):
                row[s] = -score[s] * (reach * step[s]) if s <= t else zero


@inlined
def decay(decayed, inner, step, last):
    """−e⊙G."""
    for t in range(len(decayed)):
        e = -last * step[t]
        row, line = decayed[t], inner[t]
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
def advance(state, keys, decayed, sums):
    """[W; c] of the next chunk: W' = W − (e⊙K)ᵀG, c' = c − eᵀG; `sums` is a row to work in."""
    add_product(state[:-1], keys.T, decayed)
    sum_rows(sums[0], decayed)
    add(state[-1:], sums)
