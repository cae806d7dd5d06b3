"""ViT³'s gated inner step on a CPU, compiled by numba: README.md's maths by tiles of tokens.

One program takes up to CHUNK tokens of one head of one image, with its matrices in the cache, and
has its own part of every result. Each program writes partial sums over its tokens, which are added
in a fixed order: results do not depend on the number or order of threads. bf16 and fp16 are
computed in fp32, as in the reference.

The two matrices of a pair are side by side, as in the reference: dense, (d, 2d), or in the kernels
each padded with zeros to whole blocks of COLUMNS, (d', 2d').
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .._inputs import state_dtype
from .._numba import (
    COLUMNS,
    add_product,
    clear,
    column_norms,
    damped_backward,
    flat,
    formula,
    inlined,
    jit,
    load,
    padded,
    parallel,
    silu_derivatives,
    store,
)

CHUNK, _TILE = 512, 64


def unsupported_reason(q: Tensor) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    return None


# ----------------------------------------------------------------------------------------- formulas


@formula
def _inner_step(v, z1, z2):
    """[V⊙a | V⊙z1⊙a′]."""
    a, slope, _ = silu_derivatives(z2)
    return v * a, v * z1 * slope


@formula
def _gate(u1, u2):
    """u1⊙silu(u2)."""
    return (u1 * silu_derivatives(u2)[0],)


@formula
def _gate_backward(do, u1, u2):
    """dU."""
    a, slope, _ = silu_derivatives(u2)
    return do * a, do * u1 * slope


@formula
def _inner_step_backward(v, z1, z2, r1, r2):
    """dV; [V⊙a | V⊙z1⊙a′]; dZ."""
    a, slope, bend = silu_derivatives(z2)
    mixed, steep = r2 * z1, v * slope
    return (
        r1 * a + mixed * slope,
        v * a,
        z1 * steep,
        r2 * steep,
        v * (r1 * slope + mixed * bend),
    )


# -------------------------------------------------------------------------------------------- parts


@inlined
def _find(places, number, sizes, strides):
    """Image, head and chunk of a program, its first token and the end of its tokens.

    Fills a row of `places` for each row of `strides` (of images, tokens and heads).
    """
    tokens, heads, chunks = sizes[:3]
    image, head, chunk = number // (heads * chunks), number // chunks % heads, number % chunks
    for i in range(len(strides)):
        places[i, 0] = image * strides[i, 0] + head * strides[i, 2]
        places[i, 1] = strides[i, 1]
    return image, head, chunk, chunk * CHUNK, min(tokens, (chunk + 1) * CHUNK)


@inlined
def _pad(out, left, right):
    """Copies a pair into the corners of two padded matrices."""
    columns = len(out)
    for i in range(len(left)):
        row, x, y = out[i], left[i], right[i]
        for c in range(len(x)):
            row[c] = x[c]
        for c in range(len(y)):
            row[columns + c] = y[c]


@inlined
def _total(out, sums):
    """Adds the chunks' sums in order."""
    clear(out, 0)
    for n in range(len(sums)):
        for i in range(len(out)):
            row, x = out[i], sums[n, i]
            for c in range(len(row)):
                row[c] += x[c]


@inlined
def _take_step(weights, inner, norms, w1, w2, g, damping):
    """Sets `weights` to W − g/(‖g‖ + 1), by columns; without damping to W − g."""
    dim = len(g)
    _pad(weights, w1, w2)
    _pad(inner, g[:, :dim], g[:, dim:])
    column_norms(norms, inner)
    for c in range(len(norms)):
        norms[c] = damping / (norms[c] + 1) + (1 - damping)
    # Keeps the padding 0, which NaN · 0 would overwrite.
    for i in range(dim):
        row, x = weights[i], inner[i]
        for c in range(len(row)):
            row[c] -= x[c] * norms[c]


# ------------------------------------------------------------------------------------------ kernels
# Each runs the programs from `start` to `stop`. `numbers` are κ = s/N and damping (0 or 1).


@jit
def _step(start, stop, sizes, numbers, k, v, strides, w1, w2, sums):
    """−G/κ, by chunks."""
    dim, columns = sizes[3:]
    keys, values = np.zeros((_TILE, columns), k.dtype), np.zeros((_TILE, columns), k.dtype)
    z = np.zeros((_TILE, 2 * columns), k.dtype)
    weights = np.zeros((columns, 2 * columns), k.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, head, chunk, begin, end = _find(places, number, sizes, strides)
        _pad(weights, w1[head], w2[head])
        for first in range(begin, end, _TILE):
            count = min(_TILE, end - first)
            load(keys, k, places[0], first, count, dim)
            load(values, v, places[1], first, count, dim)
            clear(z, 0)
            add_product(z, keys, weights)
            for t in range(count):
                left, right = z[t, :columns], z[t, columns:]
                _inner_step((left, right), (values[t], left, right))
            add_product(sums[image, head, chunk], keys.T, z)


@jit
def _inner_gradient(start, stop, sizes, numbers, sums, g):
    """G of one head of one image."""
    dim, columns = sizes[3:]
    total = np.zeros((columns, 2 * columns), g.dtype)
    for number in range(start, stop):
        image, head = number // sizes[1], number % sizes[1]
        _total(total, sums[image, head])
        for i in range(dim):
            row, x = g[image, head, i], total[i]
            for c in range(dim):
                row[c] = -numbers[0] * x[c]
            for c in range(dim):
                row[dim + c] = -numbers[0] * x[columns + c]


@jit
def _read(start, stop, sizes, numbers, q, o, strides, w1, w2, g):
    """O."""
    dim, columns = sizes[3:]
    queries = np.zeros((_TILE, columns), q.dtype)
    u = np.zeros((_TILE, 2 * columns), q.dtype)
    stepped = np.zeros((columns, 2 * columns), q.dtype)
    inner = np.zeros((columns, 2 * columns), q.dtype)
    norms = np.zeros(2 * columns, q.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, head, _, begin, end = _find(places, number, sizes, strides)
        _take_step(stepped, inner, norms, w1[head], w2[head], g[image, head], numbers[1])
        for first in range(begin, end, _TILE):
            count = min(_TILE, end - first)
            load(queries, q, places[0], first, count, dim)
            clear(u, 0)
            add_product(u, queries, stepped)
            for t in range(count):
                left, right = u[t, :columns], u[t, columns:]
                _gate((left,), (left, right))
            store(u, o, places[1], first, count, dim)


@jit
def _read_backward(start, stop, sizes, numbers, do, q, dq, strides, w1, w2, g, sums):
    """dQ, and dW′ by chunks."""
    dim, columns = sizes[3:]
    queries, grad = np.zeros((_TILE, columns), q.dtype), np.zeros((_TILE, columns), q.dtype)
    dqueries, du = np.zeros((_TILE, columns), q.dtype), np.zeros((_TILE, 2 * columns), q.dtype)
    stepped = np.zeros((columns, 2 * columns), q.dtype)
    inner = np.zeros((columns, 2 * columns), q.dtype)
    norms = np.zeros(2 * columns, q.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, head, chunk, begin, end = _find(places, number, sizes, strides)
        _take_step(stepped, inner, norms, w1[head], w2[head], g[image, head], numbers[1])
        for first in range(begin, end, _TILE):
            count = min(_TILE, end - first)
            load(grad, do, places[0], first, count, dim)
            load(queries, q, places[1], first, count, dim)
            clear(du, 0)
            add_product(du, queries, stepped)
            for t in range(count):
                left, right = du[t, :columns], du[t, columns:]
                _gate_backward((left, right), (grad[t], left, right))
            add_product(sums[image, head, chunk], queries.T, du)
            clear(dqueries, 0)
            add_product(dqueries, du, stepped.T)
            store(dqueries, dq, places[2], first, count, dim)


@jit
def _step_gradients(start, stop, sizes, numbers, sums, g, j):
    """j of one head of one image."""
    dim, columns = sizes[3:]
    inner = np.zeros((columns, 2 * columns), g.dtype)
    norms, along = np.zeros(2 * columns, g.dtype), np.zeros(2 * columns, g.dtype)
    for number in range(start, stop):
        image, head = number // sizes[1], number % sizes[1]
        out = j[image, head]
        _total(out, sums[image, head])
        if numbers[1]:
            _pad(inner, g[image, head, :, :dim], g[image, head, :, dim:])
            damped_backward(out, inner, norms, along)
        for i in range(columns):
            row = out[i]
            for c in range(len(row)):
                row[c] *= numbers[0]


@jit
def _step_backward(start, stop, sizes, numbers, k, v, dk, dv, strides, w1, w2, j, sums):
    """dK and dV, and what the chunks add to dW′ to get dW."""
    dim, columns = sizes[3:]
    keys, values = np.zeros((_TILE, columns), k.dtype), np.zeros((_TILE, columns), k.dtype)
    z, dz = np.zeros((_TILE, 2 * columns), k.dtype), np.zeros((_TILE, 2 * columns), k.dtype)
    dkeys, dvalues = np.zeros((_TILE, columns), k.dtype), np.zeros((_TILE, columns), k.dtype)
    weights = np.zeros((columns, 2 * columns), k.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, head, chunk, begin, end = _find(places, number, sizes, strides)
        _pad(weights, w1[head], w2[head])
        grads = j[image, head]
        for first in range(begin, end, _TILE):
            count = min(_TILE, end - first)
            load(keys, k, places[0], first, count, dim)
            load(values, v, places[1], first, count, dim)
            clear(z, 0)
            clear(dz, 0)
            add_product(z, keys, weights)
            add_product(dz, keys, grads)
            for t in range(count):
                z1, z2, r1, r2 = z[t, :columns], z[t, columns:], dz[t, :columns], dz[t, columns:]
                _inner_step_backward((dvalues[t], z1, z2, r1, r2), (values[t], z1, z2, r1, r2))
            add_product(sums[image, head, chunk], keys.T, dz)
            clear(dkeys, 0)
            add_product(dkeys, z, grads.T)
            add_product(dkeys, dz, weights.T)
            store(dkeys, dk, places[2], first, count, dim)
            store(dvalues, dv, places[3], first, count, dim)


@jit
def _weight_gradients(start, stop, sizes, numbers, sums, dw1, dw2):
    """dW1 and dW2 of one head, over all images and chunks."""
    dim, columns = sizes[3:]
    total = np.zeros((columns, 2 * columns), dw1.dtype)
    image_total = np.zeros((columns, 2 * columns), dw1.dtype)
    for head in range(start, stop):
        clear(total, 0)
        for image in range(len(sums)):
            _total(image_total, sums[image, head])
            for i in range(dim):
                row, x = total[i], image_total[i]
                for c in range(len(row)):
                    row[c] += x[c]
        for i in range(dim):
            left, right, x = dw1[head, i], dw2[head, i], total[i]
            for c in range(dim):
                left[c] = x[c]
            for c in range(dim):
                right[c] = x[columns + c]


# ---------------------------------------------------------------------------------------------- op


class _Launch:
    """Calls kernels for all programs, with the arguments that all of them take."""

    def __init__(self, q: Tensor, scale: float, damping: bool) -> None:
        self.batch, tokens, self.heads, dim = q.shape
        self.chunks, self.columns = -(-tokens // CHUNK), padded(dim, COLUMNS)
        self.dtype = state_dtype(q.dtype)
        self.sizes = tokens, self.heads, self.chunks, dim, self.columns
        kind = np.float64 if self.dtype is torch.float64 else np.float32
        self.numbers = kind(scale / tokens), kind(damping)

    def pairs(self, like: Tensor, *lead: int) -> Tensor:
        """Zeros: a padded pair for each head of each image, or for each chunk."""
        lead = self.batch, self.heads, *lead
        return like.new_zeros((*lead, self.columns, 2 * self.columns), dtype=self.dtype)

    def chunked(self, kernel: Callable, tokens: tuple[Tensor, ...], *matrices: Tensor) -> None:
        """One program for each chunk; kernels take tokens `(B, N, H, d)` first."""
        # Results have the state's type, so that `flat` returns their own memory.
        rows, strides = flat(*tokens, dtype=self.dtype, lead=3)
        count = self.batch * self.heads * self.chunks
        # Two products with a pair, forward.
        work = 4 * self.columns**2 * self.batch * self.heads * self.sizes[0]
        self._run(kernel, count, work, *rows, strides, *(x.detach().numpy() for x in matrices))

    def by_head(self, kernel: Callable, *matrices: Tensor, images: bool = True) -> None:
        """One program for each head of each image."""
        count = (self.batch if images else 1) * self.heads
        work = 2 * self.columns**2 * self.batch * self.heads * self.chunks
        self._run(kernel, count, work, *(x.detach().numpy() for x in matrices))

    def _run(self, kernel: Callable, count: int, work: int, *arrays: np.ndarray) -> None:
        parallel(kernel, count, work, self.sizes, self.numbers, *arrays)


def _copies(*weights: Tensor) -> list[Tensor]:
    """FSDP cannot resize a parameter's storage that has ever had a NumPy view."""
    return [w.detach().clone(memory_format=torch.contiguous_format) for w in weights]


def forward(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, scale: float, damping: bool = True
) -> tuple[Tensor, Tensor]:
    """Computes `reference.forward`."""
    launch, dim = _Launch(q, scale, damping), q.shape[-1]
    w1, w2 = _copies(w1, w2)
    o = q.new_empty(q.shape, dtype=launch.dtype)
    g = w1.new_empty((len(q), len(w1), dim, 2 * dim))
    sums = launch.pairs(w1, launch.chunks)
    launch.chunked(_step, (k, v), w1, w2, sums)
    launch.by_head(_inner_gradient, sums, g)
    launch.chunked(_read, (q, o), w1, w2, g)
    return o.to(q.dtype), g


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    g: Tensor,
    scale: float,
    damping: bool = True,
) -> tuple[Tensor, ...]:
    """Computes `reference.backward`."""
    launch = _Launch(q, scale, damping)
    w1, w2 = _copies(w1, w2)
    g = g.contiguous()
    dq, dk, dv = (q.new_empty(q.shape, dtype=launch.dtype) for _ in 'qkv')
    dw1, dw2 = w1.new_empty(w1.shape), w2.new_empty(w2.shape)
    sums, j = launch.pairs(w1, launch.chunks), launch.pairs(w1)
    launch.chunked(_read_backward, (do, q, dq), w1, w2, g, sums)
    launch.by_head(_step_gradients, sums, g, j)
    launch.chunked(_step_backward, (k, v, dk, dv), w1, w2, j, sums)
    launch.by_head(_weight_gradients, sums, dw1, dw2, images=False)
    return (*(x.to(q.dtype) for x in (dq, dk, dv)), dw1, dw2)
