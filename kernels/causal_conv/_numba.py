"""Causal convolutions along scans on a CPU, compiled by numba.

A program has up to _CHUNK tokens of one scan of one image, which it copies with their past.
The sums over tokens of the weights' gradients are added in a fixed order: results do not depend on
the number or order of threads. bf16 and fp16 are computed in fp32, as in the reference.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._numba import COLUMNS, add, clear, flat, formula, inlined, jit, load, parallel, store

_CHUNK = 64


def unsupported_reason(x: Tensor, weight: Tensor) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    return None


# -------------------------------------------------------------------------------------------- rows


@formula
def _add_tap(y, x, w):
    return (y + x * w,)


@formula
def _add_taps(y, x0, x1, x2, x3, w0, w1, w2, w3):
    return (y + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3,)


@formula
def _add_products(s0, s1, s2, s3, dy, x0, x1, x2, x3):
    return s0 + dy * x0, s1 + dy * x1, s2 + dy * x2, s3 + dy * x3


@inlined
def _filter(out, x, taps):
    """out[t] += Σ_j taps[j]·x[t + j]."""
    whole = len(taps) - len(taps) % 4
    for t in range(len(out)):
        row = out[t]
        for j in range(0, whole, 4):
            a, b, c, d = x[t + j], x[t + j + 1], x[t + j + 2], x[t + j + 3]
            four = taps[j], taps[j + 1], taps[j + 2], taps[j + 3]
            _add_taps((row,), (row, a, b, c, d, *four))
        for j in range(whole, len(taps)):
            _add_tap((row,), (row, x[t + j], taps[j]))


@inlined
def _correlate(sums, dy, x):
    """sums[j] += Σ_t dy[t]·x[t + j]."""
    whole = len(sums) - len(sums) % 4
    for t in range(len(dy)):
        line = dy[t]
        for j in range(0, whole, 4):
            a, b, c, d = x[t + j], x[t + j + 1], x[t + j + 2], x[t + j + 3]
            four = sums[j], sums[j + 1], sums[j + 2], sums[j + 3]
            _add_products(four, (*four, line, a, b, c, d))
        for j in range(whole, len(sums)):
            _add_tap((sums[j],), (sums[j], line, x[t + j]))


# ------------------------------------------------------------------------------------------- scans


@inlined
def _find(places, number, sizes, strides):
    """Image, scan and chunk of a program, its first token and the end of its tokens.

    Fills a row of `places` for each row of `strides` (of images, tokens and scans).
    """
    tokens, scans, chunks = sizes[:3]
    image, scan, chunk = number // (scans * chunks), number // chunks % scans, number % chunks
    for i in range(len(strides)):
        places[i, 0] = image * strides[i, 0] + scan * strides[i, 2]
        places[i, 1] = strides[i, 1]
    return image, scan, chunk, chunk * _CHUNK, min(tokens, (chunk + 1) * _CHUNK)


@inlined
def _load_taps(out, weight, channels, turned):
    """Taps `(K, C)` in the order of the tokens that they multiply, which `turned` reverses."""
    taps = len(out)
    for j in range(taps):
        row, line = out[taps - 1 - j if turned else j], weight[j]
        for c in range(channels):
            row[c] = line[c]


@inlined
def _load_tokens(out, x, place, begin, end, reach, sizes):
    """Tokens from `begin` − `reach`, or to `end` − `reach` if it is negative; zeros outside."""
    first, last = begin - max(reach, 0), end - min(reach, 0)
    low, high = max(first, 0), min(last, sizes[0])
    clear(out[: low - first], 0)
    load(out[low - first :], x, place, low, high - low, sizes[4])


# ----------------------------------------------------------------------------------------- kernels
# Each runs the programs from `start` to `stop`. `sizes` are T, R, chunks, K, C; `turned` has a scan
# whose past lies at larger t. Tokens are rows of memory: x and the outputs, or x, their gradients
# and dx.


@jit
def _forward(start, stop, sizes, turned, tokens, strides, weights):
    """A y for each weight."""
    taps, channels = sizes[3:]
    columns = -(-channels // COLUMNS) * COLUMNS
    x = np.zeros((_CHUNK + taps - 1, columns), weights.dtype)
    out, kernel = np.zeros((_CHUNK, columns), x.dtype), np.zeros((taps, columns), x.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    for number in range(start, stop):
        _, scan, _, begin, end = _find(places, number, sizes, strides)
        reach = 1 - taps if turned[scan] else taps - 1
        _load_tokens(x, tokens[0], places[0], begin, end, reach, sizes)
        for n in range(len(weights)):
            _load_taps(kernel, weights[n, scan], channels, turned[scan])
            clear(out, 0)
            _filter(out[: end - begin], x, kernel)
            store(out, tokens[n + 1], places[n + 1], begin, end - begin, channels)


@jit
def _backward(start, stop, sizes, turned, tokens, strides, weights, sums):
    """dx, and each chunk's dW."""
    taps, channels = sizes[3:]
    columns = -(-channels // COLUMNS) * COLUMNS
    x = np.zeros((_CHUNK + taps - 1, columns), weights.dtype)
    dy, dx = np.zeros_like(x), np.zeros((_CHUNK, columns), x.dtype)
    kernel, total = np.zeros((taps, columns), x.dtype), np.zeros((taps, columns), x.dtype)
    places = np.zeros((len(strides), 2), np.int64)
    last = len(strides) - 1
    for number in range(start, stop):
        image, scan, chunk, begin, end = _find(places, number, sizes, strides)
        reach, count = 1 - taps if turned[scan] else taps - 1, end - begin
        _load_tokens(x, tokens[0], places[0], begin, end, reach, sizes)
        clear(dx, 0)
        for n in range(len(weights)):
            _load_tokens(dy, tokens[n + 1], places[n + 1], begin, end, -reach, sizes)
            # A token adds to its past what the past's taps made of it.
            _load_taps(kernel, weights[n, scan], channels, not turned[scan])
            _filter(dx[:count], dy, kernel)
            clear(total, 0)
            _correlate(total, dy[max(-reach, 0) :][:count], x)
            _load_taps(sums[image, chunk, n, scan], total, channels, turned[scan])
        store(dx, tokens[last], places[last], begin, count, channels)


@jit
def _total(start, stop, sums, dweights):
    """dW of every weight and scan, over all chunks of an image and then over the images."""
    image_sum = np.zeros(dweights.shape[2:], sums.dtype)
    for number in range(start, stop):
        n, scan = number // dweights.shape[1], number % dweights.shape[1]
        for image in range(len(sums)):
            clear(image_sum, 0)
            for chunk in range(sums.shape[1]):
                add(image_sum, sums[image, chunk, n, scan])
            add(dweights[n, scan], image_sum)


# ---------------------------------------------------------------------------------------------- op


def _run(
    kernel: Callable, ways: str, tokens: tuple[Tensor, ...], weights: tuple[Tensor, ...], *out: Any
) -> None:
    """Runs the programs of a kernel on tokens `(B, T, R, C)` and weights `(R, C, K)`."""
    batch, length, scans, channels = tokens[0].shape
    # A copy: FSDP cannot resize memory that ever had a NumPy view.
    taps = torch.stack([w.detach().mT for w in weights])
    # Results have the state's type, so that `flat` returns their own memory.
    rows, strides = flat(*tokens, dtype=taps.dtype, lead=3)
    sizes = length, scans, -(-length // _CHUNK), taps.shape[2], channels
    turned = np.array([way == 'b' for way in ways])
    # At a fifth of the speed of products.
    work = 5 * (len(tokens) - 1) * taps.shape[2] * tokens[0].numel()
    programs = batch * scans * sizes[2]
    parallel(kernel, programs, work, sizes, turned, tuple(rows), strides, taps.numpy(), *out)


def forward(x: Tensor, weight: Tensor, other: Tensor | None, ways: str) -> tuple[Tensor, Tensor]:
    """Computes `reference.forward`."""
    weights = (weight,) if other is None else (weight, other)
    outs = [x.new_empty(x.shape, dtype=weight.dtype) for _ in weights]
    _run(_forward, ways, (x, *outs), weights)
    y, *z = (out.to(x.dtype) for out in outs)
    return y, z[0] if z else x.new_empty(0)


def backward(
    dy: Tensor, dz: Tensor | None, x: Tensor, weight: Tensor, other: Tensor | None, ways: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.backward`."""
    grads, weights = ((dy,), (weight,)) if other is None else ((dy, dz), (weight, other))
    batch, length, scans, channels = x.shape
    dx = x.new_empty(x.shape, dtype=weight.dtype)
    dweights = weight.new_zeros((len(weights), scans, weight.shape[2], channels))
    sums = weight.new_empty((batch, -(-length // _CHUNK), *dweights.shape))
    _run(_backward, ways, (x, *grads, dx), weights, sums.numpy())
    parallel(_total, len(weights) * scans, sums.numel(), sums.numpy(), dweights.numpy())
    # An op's outputs must not share memory.
    dweight, *dother = (w.mT.clone(memory_format=torch.contiguous_format) for w in dweights)
    return dx.to(x.dtype), dweight, dother[0] if dother else weight.new_empty(0)
