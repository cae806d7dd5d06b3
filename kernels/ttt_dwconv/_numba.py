"""ViT³'s depth-wise inner step on a CPU: the reference with its loops over maps in numba.

A program has COLUMNS channels of one image and its own part of the result, and images are summed in
order: results do not depend on the number or order of threads. bf16 and fp16 are computed in fp32,
as in the reference.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from .._numba import COLUMNS, add_products, jit, padded, parallel, sum_in_order
from . import reference


def unsupported_reason(q: Tensor) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    return None


@jit
def _products(start, stop, x, y, out):
    """The programs from `start` to `stop`; x is padded by a pixel, out is zero."""
    _, h, w, channels = y.shape
    blocks = channels // COLUMNS
    # Sum of one row of the map, so that the sum over rows rounds once for each row.
    sums = np.zeros(COLUMNS, out.dtype)
    for number in range(start, stop):
        image, first = number // blocks, number % blocks * COLUMNS
        last = first + COLUMNS
        for tap in range(9):
            total = out[image, tap, first:last]
            for i in range(h):
                sums[:] = 0
                for j in range(w):
                    moved = x[image, i + tap // 3, j + tap % 3, first:last]
                    add_products(sums, moved, y[image, i, j, first:last])
                for c in range(COLUMNS):
                    total[c] += sums[c]


@jit
def _correlate(start, stop, x, taps, out):
    """The programs from `start` to `stop`; x is padded by a pixel, out is zero."""
    _, h, w, channels = out.shape
    blocks = channels // COLUMNS
    for number in range(start, stop):
        image, first = number // blocks, number % blocks * COLUMNS
        last = first + COLUMNS
        for i in range(h):
            for j in range(w):
                total = out[image, i, j, first:last]
                for tap in range(9):
                    moved = x[image, i + tap // 3, j + tap % 3, first:last]
                    add_products(total, moved, taps[image, tap, first:last])


def _wide(x: Tensor, border: int = 0) -> np.ndarray:
    """Copies whole blocks of channels, dense, into a frame of zeros."""
    channels = padded(x.shape[-1], COLUMNS) - x.shape[-1]
    if channels or border:
        x = F.pad(x, (0, channels, *[border] * 4) if border else (0, channels))
    return x.contiguous().numpy()


def _run(kernel: Callable, x: Tensor, other: Tensor, size: tuple[int, ...]) -> Tensor:
    """`(B, *size, d)`."""
    channels = padded(x.shape[-1], COLUMNS)
    out = x.new_zeros((len(x), *size, channels))
    programs = len(x) * (channels // COLUMNS)
    # Nine multiply-adds for each number, at a fifth of the speed of products.
    parallel(kernel, programs, 45 * x.numel(), _wide(x, border=1), _wide(other), out.numpy())
    return out[..., : x.shape[-1]]


def products(x: Tensor, y: Tensor) -> Tensor:
    """Computes `reference.products`."""
    return _run(_products, x, y, (9,))


def correlate(x: Tensor, taps: Tensor) -> Tensor:
    """Computes `reference.correlate`."""
    return _run(_correlate, x, taps, x.shape[1:3])


forward = partial(reference.forward, products=products, correlate=correlate)
backward = partial(reference.backward, products=products, correlate=correlate, total=sum_in_order)
