"""Causal convolutions on a CPU, compiled by numba: a scan of an image after the other.

A program is one scan of one image. It reads the tokens where they are, without a copy for the past
of zeros, and alone writes to its part of every result; parts are summed in the order of the
images, so that neither the number of threads nor theirs changes a bit. fp32 and fp64 run as they
are, bf16 and fp16 in fp32.
"""

import numpy as np
import torch
from torch import Tensor

from .._inputs import state_dtype
from .._numba import add, clear, flat, jit, parallel, part, sum_in_order


def supported(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot run with these arguments, in a sentence; None where they can."""
    return None


# A multiply-add here against one of a product, which stays in registers.
_SLOWER = 12
# Tokens whose parts of a weight's gradient are summed before they are added to those of all.
_LOT = 256


@part
def _add(total, x, y):
    for i in range(len(total)):
        total[i] += x[i] * y[i]


@jit
def _forward(start, stop, way, strides, x, weight, y):
    """The programs from `start` to `stop`; way: −1 or 1, where the past of each scan lies."""
    tokens, scans, channels = y.shape[1:]
    taps = weight.shape[1]
    for program in range(start, stop):
        image, r = program // scans, program % scans
        base = image * strides[0] + r * strides[2]
        for t in range(tokens):
            row = y[image, t, r]
            row[:] = 0
            for tap in range(taps):
                s = t + way[r] * (taps - 1 - tap)
                if 0 <= s < tokens:
                    place = base + s * strides[1]
                    _add(row, weight[r, tap], x[place : place + channels])


@jit
def _backward(start, stop, way, strides, dy, x, weight, dx, dweight):
    """The programs from `start` to `stop`; adds to dx and dweight."""
    tokens, scans, channels = dx.shape[1:]
    taps = weight.shape[1]
    # Of some tokens, so that the sum of all takes one rounding for each lot of them.
    sums = np.zeros((taps, channels), dweight.dtype)
    for program in range(start, stop):
        image, r = program // scans, program % scans
        base = image * strides[0, 0] + r * strides[0, 2]
        for t in range(tokens):
            row = dx[image, t, r]
            place = image * strides[1, 0] + t * strides[1, 1] + r * strides[1, 2]
            here = x[place : place + channels]
            for tap in range(taps):
                s = t - way[r] * (taps - 1 - tap)
                if 0 <= s < tokens:
                    place = base + s * strides[0, 1]
                    reader = dy[place : place + channels]
                    _add(row, weight[r, tap], reader)
                    _add(sums[tap], here, reader)
            if t % _LOT == _LOT - 1 or t == tokens - 1:
                add(dweight[image, r], sums)
                clear(sums, 0)


def _ways(ways: str) -> np.ndarray:
    return np.array([1 if way == 'b' else -1 for way in ways])


def _turned(weight: Tensor) -> np.ndarray:
    """`(R, K, C)`; a copy: memory of which NumPy had a view cannot be resized, by FSDP."""
    return weight.detach().mT.clone(memory_format=torch.contiguous_format).numpy()


def forward(x: Tensor, weight: Tensor, other: Tensor | None, ways: str) -> tuple[Tensor, Tensor]:
    """As `reference.forward`."""
    state = state_dtype(x.dtype)

    def filtered(w: Tensor) -> Tensor:
        y = x.new_empty(x.shape, dtype=state)
        if len(x):
            (row,), strides = flat(x, dtype=state, lead=3)
            work = _SLOWER * w.shape[-1] * x.numel()
            programs = x.shape[0] * x.shape[2]
            parallel(_forward, programs, work, _ways(ways), strides[0], row, _turned(w), y.numpy())
        return y.to(x.dtype)

    return filtered(weight), x.new_empty(0) if other is None else filtered(other)


def backward(
    dy: Tensor, dz: Tensor | None, x: Tensor, weight: Tensor, other: Tensor | None, ways: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.backward`."""
    batch, _, scans, channels = x.shape
    state, taps = state_dtype(x.dtype), weight.shape[-1]
    dx, grads = x.new_zeros(x.shape, dtype=state), []
    for dout, w in ((dy, weight), (dz, other)):
        if w is None:
            continue
        dw = x.new_zeros((batch, scans, taps, channels), dtype=state)
        if batch:
            rows, strides = flat(dout, x, dtype=state, lead=3)
            parallel(
                _backward,
                batch * scans,
                2 * _SLOWER * taps * x.numel(),
                _ways(ways),
                strides,
                *rows,
                _turned(w),
                dx.numpy(),
                dw.numpy(),
            )
        grads.append(sum_in_order(dw).mT.contiguous())
    return dx.to(x.dtype), grads[0], grads[1] if len(grads) > 1 else weight.new_empty(0)
