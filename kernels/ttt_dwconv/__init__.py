"""ViT³'s depth-wise 3×3 inner model with one full-batch training step, as a registered op."""

import math

import torch
from torch import Tensor

from .. import _inputs
from .._op import Args, Op
from . import reference

_NAME = 'ttt_dwconv'


def ttt_dwconv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    *,
    hw: tuple[int, int],
    scale: float = 1 / 3,
    damping: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Filters q with 3×3 kernels after one gradient step on (k, v) (ViT³, Sec. 4).

    Every image starts from the kernels `w3`, one per channel, takes one step of 1.0 on the inner
    loss `−(scale/N)·Σ f(k)·v` over all N = h·w pixels, f a depth-wise convolution with zero padding
    1, and returns f(q) of its new kernels. `damping` divides the gradient of each 3×3 kernel by its
    norm plus 1: `g/(‖g‖₂ + 1)`.

    B images of h×w pixels, d channels.

    Args:
        q, k, v: `(B, h·w, d)`, pixels row by row, one dtype of fp32, bf16, fp16, fp64; any strides,
            so that they may be views of one packed projection.
        w3: `(d, 3, 3)` fp32 (fp64 where q is fp64).
        hw: height and width of the map, python ints.
        scale: s of the inner loss. s/N is applied in fp32 after the sum over the pixels.
        damping: Whether to divide the gradient by its norm plus one, as published.
        backend: 'triton', 'numba' or 'reference' forces one (see `ttt_kernels`).

    Inner gradients and sums are kept in the dtype of w3. Under autocast q, k and v go to the
    autocast dtype, w3 stays fp32.

    Returns:
        `(B, h·w, d)`, contiguous, dtype of q.
    """
    if (
        not isinstance(hw, tuple | list)
        or len(hw) != 2
        or not all(isinstance(n, int | torch.SymInt) and not isinstance(n, bool) for n in hw)
    ):
        raise TypeError(f'{_NAME}: hw={hw!r}: give two integers (height, width).')
    return OP(q, k, v, w3, *hw, scale, damping, backend=backend)[0]


def _check(
    q: Tensor, k: Tensor, v: Tensor, w3: Tensor, h: int, w: int, scale: float, damping: bool
) -> Args:
    sizes = _inputs.sizes_of(_NAME, 'q', q, '(B, h·w, d)', 'd')
    if min(h, w) < 1:
        raise ValueError(
            f'{_NAME}: hw={(h, w)}: give 1 or more of each, and skip the call for an empty map.'
        )
    if q.shape[1] != h * w:
        raise ValueError(
            f'{_NAME}: hw = {(h, w)} makes {h * w} pixels, and q has {q.shape[1]}: {tuple(q.shape)}'
        )
    _inputs.check_tokens(_NAME, q, sizes, k=k, v=v)
    _inputs.check_parameters(_NAME, q.dtype, {**sizes, '3': 3}, '(d, 3, 3)', w3=w3)
    _inputs.check_damped_step(_NAME, scale, damping)
    return q, k, v, w3, h, w, float(scale), damping


def _fake(args: Args, keep: bool) -> tuple[Tensor, Tensor]:
    q, w3 = args.q, args.w3
    return q.new_empty(q.shape), w3.new_empty((q.shape[0], 9, q.shape[2]))


OP = Op(
    _NAME,
    'Tensor q, Tensor k, Tensor v, Tensor w3, SymInt h, SymInt w, float scale, bool damping',
    reference,
    reference.primal,
    _check,
    _fake,
    # Nine products a pixel and channel for the gradient, nine for the reading. Backward: nine for
    # each of dQ, dW′, dK and dV.
    (lambda q, *_: 2 * 18 * math.prod(q), lambda q, *_: 2 * 36 * math.prod(q)),
    tokens=('q', 'k', 'v'),
    kept=('g',),
    typical={'w3': (0, 0.3)},
)
