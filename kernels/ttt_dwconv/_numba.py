"""ViT³'s depth-wise inner step on a CPU, compiled by numba.

A program has COLUMNS channels of one image and its own part of every result, and images are summed
in order: results do not depend on the number or order of threads. bf16 and fp16 are computed in
fp32, as in the reference.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from torch import Tensor

from .._numba import (
    COLUMNS,
    Vector,
    clear,
    column_norms,
    damped_backward,
    flat,
    inlined,
    intrinsic,
    jit,
    load,
    padded,
    parallel,
    store,
    sum_in_order,
)


def unsupported_reason(q: Tensor) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    return None


# -------------------------------------------------------------------------------------------- rows
# Rows of a map, `(w, COLUMNS)`; rows of x have a zero at both ends, `(w + 2, COLUMNS)`.


def _blocks(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[Any, ...]:
    """Functions that load and store a block of an array, by the numbers of both; the width."""
    arrays = [
        context.make_array(kind)(context, builder, value)
        for kind, value in zip(signature.args, arguments, strict=True)
    ]
    dtype = signature.args[0].dtype
    block = ir.VectorType(context.get_data_type(dtype), COLUMNS).as_pointer()
    starts = [builder.bitcast(array.data, block) for array in arrays]

    def at(array: int, index: Any, shift: int = 0) -> Any:
        return builder.gep(starts[array], [builder.add(index, index.type(shift))])

    def load(*place: Any) -> Vector:
        return Vector(builder, builder.load(at(*place), align=dtype.bitwidth // 8))

    def store(x: Vector, *place: Any) -> None:
        builder.store(x.value, at(*place), align=dtype.bitwidth // 8)

    return load, store, [cgutils.unpack_tuple(builder, array.shape)[0] for array in arrays]


@intrinsic
def _add_products(context, sums, x, y):
    """sums[t] += Σ_j x[j + t] ⊙ y[j] for t = 0, 1, 2."""

    def generate(context, builder, signature, arguments):
        load, store, (_, _, width) = _blocks(context, builder, signature, arguments)
        first = width.type(0)
        zero = load(0, first).constant(0).value
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(3)]
        with cgutils.for_range(builder, width) as loop:
            y_block = load(2, loop.index)
            for t, total in enumerate(totals):
                sum_ = Vector(builder, builder.load(total)) + load(1, loop.index, t) * y_block
                builder.store(sum_.value, total)
        # The sum over rows rounds once for each row.
        for t, total in enumerate(totals):
            store(load(0, first, t) + Vector(builder, builder.load(total)), 0, first, t)
        return context.get_dummy_value()

    return types.void(sums, x, y), generate


@intrinsic
def _add_filtered(context, out, x, taps):
    """out[j] += Σ_t taps[t] ⊙ x[j + t] for t = 0, 1, 2."""

    def generate(context, builder, signature, arguments):
        load, store, (width, *_) = _blocks(context, builder, signature, arguments)
        weights = [load(2, width.type(0), t) for t in range(3)]
        with cgutils.for_range(builder, width) as loop:
            total = load(0, loop.index)
            for t, weight in enumerate(weights):
                total = total + load(1, loop.index, t) * weight
            store(total, 0, loop.index)
        return context.get_dummy_value()

    return types.void(out, x, taps), generate


# -------------------------------------------------------------------------------------------- maps


@inlined
def _sum_products(sums, frame, line, x, x_place, y, y_place, sizes, count):
    """sums[δ] = Σ_p x[p + δ]·y[p], of `count` channels."""
    h, w = sizes[:2]
    clear(sums, 0)
    load(frame[0, 1:], x, x_place, 0, w, count)
    for i in range(h):
        if i + 1 < h:
            load(frame[(i + 1) % 3, 1:], x, x_place, (i + 1) * w, w, count)
        load(line, y, y_place, i * w, w, count)
        for row in range(max(0, 1 - i), min(3, h + 1 - i)):
            _add_products(sums[3 * row : 3 * row + 3], frame[(i + row - 1) % 3], line)


@inlined
def _filter(out, out_place, frame, line, x, x_place, taps, sizes, count):
    """out[p] = Σ_δ taps[δ]·x[p + δ], of `count` channels."""
    h, w = sizes[:2]
    load(frame[0, 1:], x, x_place, 0, w, count)
    for i in range(h):
        if i + 1 < h:
            load(frame[(i + 1) % 3, 1:], x, x_place, (i + 1) * w, w, count)
        clear(line, 0)
        for row in range(max(0, 1 - i), min(3, h + 1 - i)):
            _add_filtered(line, frame[(i + row - 1) % 3], taps[3 * row : 3 * row + 3])
        store(line, out, out_place, i * w, w, count)


@inlined
def _find(places, number, sizes, strides):
    """Image, first channel and number of channels of a program; fills `places` for each tensor."""
    dim = sizes[2]
    blocks = (dim + COLUMNS - 1) // COLUMNS
    image, first = number // blocks, number % blocks * COLUMNS
    for i in range(len(strides)):
        places[i, 0] = image * strides[i, 0] + first
        places[i, 1] = strides[i, 1]
    return image, first, min(COLUMNS, dim - first)


@inlined
def _step(taps, norm, w3, g, damping):
    """Sets the taps to W − g/(‖g‖ + 1), without damping to W − g."""
    column_norms(norm, g)
    for tap in range(9):
        row, old, x = taps[tap], w3[tap], g[tap]
        for c in range(len(old)):
            row[c] = old[c] - x[c] / (damping * norm[c] + 1)


@inlined
def _turn(taps):
    """Reverses the taps: rotates the kernels by 180°."""
    for tap in range(4):
        row, other = taps[tap], taps[8 - tap]
        for c in range(COLUMNS):
            row[c], other[c] = other[c], row[c]


# ----------------------------------------------------------------------------------------- kernels
# Each runs the programs from `start` to `stop`. `numbers` are κ = s/N and damping (0 or 1).


@jit
def _forward(start, stop, sizes, numbers, q, k, v, o, strides, w3, g):
    """O and G."""
    frame = np.zeros((3, sizes[1] + 2, COLUMNS), q.dtype)
    line = np.zeros((sizes[1], COLUMNS), q.dtype)
    taps, sums = np.zeros((9, COLUMNS), q.dtype), np.zeros((9, COLUMNS), q.dtype)
    norm = np.zeros(COLUMNS, q.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, first, count = _find(places, number, sizes, strides)
        _sum_products(sums, frame, line, k, places[1], v, places[2], sizes, count)
        for tap in range(9):
            row, total = g[image, tap, first : first + count], sums[tap]
            for c in range(COLUMNS):
                total[c] *= -numbers[0]
            for c in range(count):
                row[c] = total[c]
        _step(taps, norm, w3[:, first : first + count], sums, numbers[1])
        _filter(o, places[3], frame, line, q, places[0], taps, sizes, count)


@jit
def _backward(start, stop, sizes, numbers, do, q, k, v, dq, dk, dv, strides, w3, g, dw):
    """dQ, dK, dV and each image's dW."""
    frame = np.zeros((3, sizes[1] + 2, COLUMNS), q.dtype)
    line = np.zeros((sizes[1], COLUMNS), q.dtype)
    taps, sums = np.zeros((9, COLUMNS), q.dtype), np.zeros((9, COLUMNS), q.dtype)
    inner = np.zeros((9, COLUMNS), q.dtype)
    norm, along = np.zeros(COLUMNS, q.dtype), np.zeros(COLUMNS, q.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        image, first, count = _find(places, number, sizes, strides)
        last = first + count
        for tap in range(9):
            row, x = inner[tap], g[image, tap, first:last]
            for c in range(count):
                row[c] = x[c]
        _step(taps, norm, w3[:, first:last], inner, numbers[1])
        _turn(taps)
        _filter(dq, places[4], frame, line, do, places[0], taps, sizes, count)
        _sum_products(sums, frame, line, q, places[1], do, places[0], sizes, count)
        for tap in range(9):
            row, total = dw[image, tap, first:last], sums[tap]
            for c in range(count):
                row[c] = total[c]
        # j, in which all gradients of the step are linear.
        if numbers[1]:
            damped_backward(sums, inner, norm, along)
        for tap in range(9):
            total = sums[tap]
            for c in range(COLUMNS):
                total[c] *= numbers[0]
        _filter(dv, places[6], frame, line, k, places[2], sums, sizes, count)
        _turn(sums)
        _filter(dk, places[5], frame, line, v, places[3], sums, sizes, count)


# ---------------------------------------------------------------------------------------------- op


def _run(
    kernel: Callable,
    tokens: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    h: int,
    w: int,
    scale: float,
    damping: bool,
) -> None:
    """Runs all programs of a kernel on tokens `(B, h·w, d)` and taps `(…, 9, d)`."""
    batch, pixels, dim = tokens[0].shape
    # Results have the state's type, so that `flat` returns their own memory.
    rows, strides = flat(*tokens, dtype=weights[0].dtype, lead=2)
    arrays = [x.detach().numpy() for x in weights]
    numbers = arrays[0].dtype.type(scale / pixels), arrays[0].dtype.type(damping)
    count = batch * (padded(dim, COLUMNS) // COLUMNS)
    # Nine multiply-adds a number and map, at a third of the speed of products.
    work = 9 * 3 * (len(tokens) // 2) * batch * pixels * padded(dim, COLUMNS)
    parallel(kernel, count, work, (h, w, dim), numbers, *rows, strides, *arrays)


def _taps(w3: Tensor) -> Tensor:
    """`(d, 3, 3)` as a new `(9, d)`: FSDP cannot resize memory that ever had a NumPy view."""
    return w3.detach().flatten(1).mT.clone(memory_format=torch.contiguous_format)


def forward(
    q: Tensor, k: Tensor, v: Tensor, w3: Tensor, h: int, w: int, scale: float, damping: bool = True
) -> tuple[Tensor, Tensor]:
    """Computes `reference.forward`."""
    o = q.new_empty(q.shape, dtype=w3.dtype)
    g = w3.new_empty((len(q), 9, q.shape[2]))
    _run(_forward, (q, k, v, o), (_taps(w3), g), h, w, scale, damping)
    return o.to(q.dtype), g


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    g: Tensor,
    h: int,
    w: int,
    scale: float,
    damping: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `reference.backward`."""
    grads = [q.new_empty(q.shape, dtype=w3.dtype) for _ in 'qkv']
    dw = g.new_empty(g.shape)
    tokens = (do, q, k, v, *grads)
    _run(_backward, tokens, (_taps(w3), g.contiguous(), dw), h, w, scale, damping)
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv, sum_in_order(dw).mT.reshape(w3.shape).contiguous()
