"""Triton kernels of a residual sum and its LayerNorm: one pass forward, one or two backward.

A tile has tokens as rows and all channels as columns, so that a norm needs no second reading. The
branch is given, or the depth-wise 3×3 convolution of x, or there is none. Backward: `_backward`
gives the gradient of the sum, and partial gradients of the norm's weights; with a convolution,
`_stencil` takes it from there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._stencil import correlate, load, load_neighbours, load_taps, residual_backward, store
from .reference import sum_dtype

MOST_CHANNELS = 2048
# Rows below a span have no variance; 1/σ must stay finite there, and in fp32.
_LEAST_EPS = 1e-30


@triton.jit
def _normalize(y, channels, D, eps):
    """Rows of y with mean 0 and variance 1, zeros beyond the channels, and 1/σ."""
    y -= (tl.sum(y, axis=1) / D)[:, None]
    y = tl.where((channels < D)[None, :], y, 0)
    rstd = 1 / tl.sqrt(tl.sum(y * y, axis=1) / D + eps)
    return y * rstd[:, None], rstd


@triton.jit(do_not_specialize=['N', 'h', 'w', 'span', 'splits'])
def _forward(
    x,  # (B, N, D), any strides but the last
    branch,
    weight,  # (D, 3, 3)
    bias,  # (D,)
    ln_weight,  # (D,)
    ln_bias,
    y,  # (B, N, D)
    normed,
    x_strides,
    branch_strides,
    eps,
    D,
    N,
    h,
    w,
    span,
    splits,
    CONV: tl.constexpr,
    BRANCH: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y and its norm of a span of tokens."""
    ACC: tl.constexpr = ln_weight.dtype.element_ty
    image = (tl.program_id(0) // splits).to(tl.int64)
    first = tl.program_id(0) % splits * span
    last = tl.minimum(first + span, N)
    channels = tl.arange(0, CHANNELS)
    x += image * x_strides[0]
    branch += image * branch_strides[0]
    y += image * N * D
    normed += image * N * D
    gain = tl.load(ln_weight + channels, mask=channels < D, other=0.0)
    offset = tl.load(ln_bias + channels, mask=channels < D, other=0.0)
    if CONV:
        taps = load_taps(weight, channels, 1, 9, D, ACC)
    if BIAS:
        shift = tl.load(bias + channels, mask=channels < D, other=0.0)
    for n in tl.range(first, last, TOKENS):
        tokens = n + tl.arange(0, TOKENS)
        if CONV:
            near = load_neighbours(x, tokens, last, x_strides[1], channels, D, h, w, ACC)
            z = near[4] + correlate(near, taps)
            if BIAS:
                z += shift[None, :]
        else:
            z = load(x, tokens, last, x_strides[1], channels, D).to(ACC)
        if BRANCH:
            z += load(branch, tokens, last, branch_strides[1], channels, D).to(ACC)
        if CONV or BRANCH:
            # The norm of what is kept.
            z = z.to(y.dtype.element_ty)
            store(y, tokens, last, D, channels, D, z)
        z, _ = _normalize(z.to(ACC), channels, D, eps)
        store(normed, tokens, last, D, channels, D, z * gain[None, :] + offset[None, :])


@triton.jit(do_not_specialize=['N', 'span', 'splits'])
def _backward(
    dy,  # (B, N, D), any strides but the last
    dn,
    y,  # (B, N, D), any strides but the last
    ln_weight,  # (D,)
    dz,  # (B, N, D)
    dbranch,
    sums,  # (B·splits, 2, D)
    dy_strides,
    dn_strides,
    y_strides,
    eps,
    D,
    N,
    span,
    splits,
    SUM: tl.constexpr,
    TWICE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient of y, if TWICE in two types, and partial ones of the norm's weights."""
    ACC: tl.constexpr = sums.dtype.element_ty
    image = (tl.program_id(0) // splits).to(tl.int64)
    first = tl.program_id(0) % splits * span
    last = tl.minimum(first + span, N)
    channels = tl.arange(0, CHANNELS)
    dy += image * dy_strides[0]
    dn += image * dn_strides[0]
    y += image * y_strides[0]
    dz += image * N * D
    dbranch += image * N * D
    gain = tl.load(ln_weight + channels, mask=channels < D, other=0.0)
    of_gain = tl.zeros((TOKENS, CHANNELS), ACC)
    of_offset = tl.zeros((TOKENS, CHANNELS), ACC)
    for n in tl.range(first, last, TOKENS):
        tokens = n + tl.arange(0, TOKENS)
        x = load(y, tokens, last, y_strides[1], channels, D).to(ACC)
        grad = load(dn, tokens, last, dn_strides[1], channels, D).to(ACC)
        x, rstd = _normalize(x, channels, D, eps)
        of_gain += grad * x
        of_offset += grad
        grad *= gain[None, :]
        along = x * (tl.sum(grad * x, axis=1) / D)[:, None]
        grad = grad - (tl.sum(grad, axis=1) / D)[:, None] - along
        grad *= rstd[:, None]
        if SUM:
            grad += load(dy, tokens, last, dy_strides[1], channels, D).to(ACC)
        store(dz, tokens, last, D, channels, D, grad)
        if TWICE:
            store(dbranch, tokens, last, D, channels, D, grad)
    sums += tl.program_id(0).to(tl.int64) * 2 * D + channels
    tl.store(sums, tl.sum(of_gain, axis=0), mask=channels < D)
    tl.store(sums + D, tl.sum(of_offset, axis=0), mask=channels < D)


# -------------------------------------------------------------------------------------------- host


# Numbers of a tile: a thread of four warps holds sixteen.
_NUMBERS = 2048


def config(dim: int) -> dict[str, int]:
    """Options to compile the kernels for `dim` channels with; the same for all dtypes and GPUs."""
    channels = max(_launch.power_of_2(dim), 16)
    return {'TOKENS': min(_NUMBERS // channels, 32), 'CHANNELS': channels, 'num_warps': 4}


def unsupported_reason(x: Tensor) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    if x.shape[-1] > MOST_CHANNELS:
        return f'C is {x.shape[-1]}; the kernels have at most {MOST_CHANNELS} channels'
    return _launch.unsupported_reason(x)


def _share(x: Tensor) -> dict[str, int]:
    batch, tokens, dim = x.shape
    options = config(dim)
    splits, span = _launch.split(tokens, batch, options['TOKENS'])
    return {'D': dim, 'N': tokens, 'span': span, 'splits': splits, **options}


def forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    h: int,
    w: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y and its norm, arguments as the reference's."""
    kept = weight is not None or branch is not None
    y = x.new_empty(x.shape if kept else 0, dtype=sum_dtype(x, branch))
    normed = x.new_empty(x.shape, dtype=dtype)
    shared = _share(x)
    ln_weight = ln_weight.contiguous()
    with torch.cuda.device_of(x):
        _forward[(x.shape[0] * shared['splits'],)](
            **_launch.with_strides(x=x, branch=x if branch is None else branch),
            weight=ln_weight if weight is None else weight.contiguous(),
            bias=ln_weight if bias is None else bias.contiguous(),
            ln_weight=ln_weight,
            ln_bias=ln_bias.contiguous(),
            y=y,
            normed=normed,
            eps=max(eps, _LEAST_EPS),
            h=h,
            w=w,
            CONV=weight is not None,
            BRANCH=branch is not None,
            BIAS=bias is not None,
            **shared,
        )
    return y, normed


def backward(
    dy: Tensor,
    dn: Tensor,
    y: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    ln_weight: Tensor,
    h: int,
    w: int,
    eps: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, branch, weight, bias, and of ln_weight and ln_bias, as the reference's."""
    dx_dtype, branch_dtype = dtypes
    twice = x is None and branch_dtype != dx_dtype
    dz = y.new_empty(y.shape, dtype=dx_dtype)
    dbranch = y.new_empty(y.shape if twice else 0, dtype=branch_dtype)
    shared = _share(y)
    programs = y.shape[0] * shared['splits']
    sums = ln_weight.new_empty((1, programs, 2, y.shape[2]))
    with torch.cuda.device_of(y):
        _backward[(programs,)](
            **_launch.with_strides(dy=dy if dy.dim() > 1 else dn, dn=dn, y=y),
            ln_weight=ln_weight.contiguous(),
            dz=dz,
            dbranch=dbranch,
            sums=sums,
            eps=max(eps, _LEAST_EPS),
            SUM=dy.dim() > 1,
            TWICE=twice,
            **shared,
        )
    dln = _launch.add_up(sums)[0]
    dweight, dbias = ln_weight.new_empty(0), ln_weight.new_empty(0)
    if x is not None and weight is not None:
        dz, dweight, dbias = residual_backward(dz, x, weight, h, w)
    return dz, dbranch, dweight, dbias, dln
