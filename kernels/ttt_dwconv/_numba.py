"""ViT³'s depth-wise inner model on a CPU, compiled by numba: the forward pass.

A program takes some rows of the map of one image. bf16 and fp16 are converted to fp32 and back.
"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from .. import _numba
from .._inputs import state_dtype
from .._numba import ROWS, add_filtered, load, parallel, spread, store
from .._op import Args
from .reference import backward as backward  # from the same g

# Pixels of a program.
_PART = 512
unsupported_reason = _numba.unsupported_reason


@_numba.jit
def _run(team, shape, strides, x, y, taps, totals):
    """Filters x to y by the taps `(B, 3, ROWS, d')`, or sums x[p + δ]·y[p] to `totals`, if any.

    Each row of three taps has zeros behind it, also in the totals `(·, 3, ROWS, d')`.
    """
    h, w, dim, size = shape
    parts, columns, layouts = -(-h // size), taps.shape[3], np.zeros((2, 2), np.int64)
    # A column of zeros before the map, and behind it what `add_filtered` reads with every tile.
    whole = -(-w // ROWS) * ROWS
    pixels = np.zeros((size + 2, whole + ROWS, columns), taps.dtype)
    line = np.zeros((whole, columns), taps.dtype)
    start, stop = spread(team, (shape, strides, x, y, taps, totals))
    for number in range(start, stop):
        image, first = number // parts, number % parts * size
        for i in range(2):
            layouts[i, 0], layouts[i, 1] = image * strides[i, 0], strides[i, 1]
        for i in range(size + 2):
            row = first - 1 + i
            count = w if 0 <= row < h else 0
            load(pixels[i, 1 : 1 + w], x, layouts[0], row * w, count, dim)
        for i in range(min(size, h - first)):
            if len(totals):
                load(line[:w], y, layouts[1], (first + i) * w, w, dim)
                for row in range(3):
                    add_filtered(totals[number, row], pixels[i + row], line[:w])
            else:
                line[:] = 0
                for row in range(3):
                    add_filtered(line, pixels[i + row], taps[image, row, :3])
                store(line, y, layouts[1], (first + i) * w, w, dim)
        if len(totals):
            totals[number, :, 3:] = 0


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Computes `reference.forward`."""
    q, k, v, w3, h, w, scale, damping = args
    batch, _, dim = q.shape
    state, size = state_dtype(q.dtype), -(-_PART // w)
    o, parts = q.new_empty(q.shape, dtype=state), -(-h // size)
    weights = F.pad(w3.detach().permute(1, 2, 0), (0, -dim % _numba.COLUMNS, 0, ROWS - 3))
    weights = weights.contiguous()  # (3, ROWS, d')
    totals, taps = (w3.new_zeros((batch, *n, *weights.shape)) for n in ((parts,), ()))
    if batch:
        rows, strides = _numba.flat(k, v, q, o, dtype=state, lead=2)
        shape, work, sums = (h, w, dim, size), 9 * q.numel(), totals.flatten(0, 1).numpy()
        inputs = (strides[:2], *rows[:2], taps.numpy(), sums)
        parallel(_run, len(sums), work, shape, *inputs)
        flattened = (x.flatten(-3, -2).numpy() for x in (totals, weights[None], taps))
        _numba.take_step(sums.dtype.type(-scale / (h * w)), damping, *flattened)
        inputs = (strides[2:], *rows[2:], taps.numpy(), sums[:0])
        parallel(_run, len(sums), work, shape, *inputs)
    return o.to(q.dtype), totals[:, 0, :, :3, :dim].flatten(1, 2)
