"""Triton kernels of a sum of branches times an activated gate: one pass, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._inputs import state_dtype
from .._stencil import load, store
from .._triton import gelu, silu
from .reference import apart


@triton.jit
def _activate(z, GELU: tl.constexpr):
    """act(z) and its derivative."""
    if GELU:
        a, slope = gelu(z)
    else:
        a, slope, _ = silu(z)
    return a, slope


@triton.jit(do_not_specialize=['N', 'span', 'splits'])
def _gated(
    x,  # (B, N, SCANS, D), any strides but the last
    gate,  # (B, N, D), likewise
    bias,  # (1 + SCANS, D)
    do,  # (B, N, D), any strides but the last
    out,  # (B, N, D)
    dx,  # (B, N, SCANS, D), any strides but the last
    dgate,  # (B, N, D), likewise
    sums,  # (B·splits, 1 + SCANS, D)
    x_strides,
    gate_strides,
    do_strides,
    dx_strides,
    dgate_strides,
    D,
    N,
    span,
    splits,
    SCANS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The output of a span of tokens, or the gradients of x and gate and their sums.

    With BIAS there is at most one branch.
    """
    image = (tl.program_id(0) // splits).to(tl.int64)
    first = tl.program_id(0) % splits * span
    last = tl.minimum(first + span, N)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x += image * x_strides[0]
    gate += image * gate_strides[0]
    out += image * N * D
    do += image * do_strides[0]
    dx += image * dx_strides[0]
    dgate += image * dgate_strides[0]
    # A product of 32-bit numbers would overflow in a branch beyond 2³¹ numbers.
    x_step, dx_step = tl.cast(x_strides[2], tl.int64), tl.cast(dx_strides[2], tl.int64)
    if BIAS:
        of_gate = tl.load(bias + channels, mask=channels < D, other=0.0)
        if SCANS:
            of_x = tl.load(bias + D + channels, mask=channels < D, other=0.0)
        sum_gate = tl.zeros((TOKENS, CHANNELS), ACC)
        sum_x = tl.zeros((TOKENS, CHANNELS), ACC)
    for n in tl.range(first, last, TOKENS):
        tokens = n + tl.arange(0, TOKENS)
        z = load(gate, tokens, last, gate_strides[1], channels, D).to(ACC)
        total = tl.full((TOKENS, CHANNELS), 0 if SCANS else 1, ACC)
        for r in tl.static_range(SCANS):
            total += load(x + r * x_step, tokens, last, x_strides[1], channels, D).to(ACC)
        if BIAS:
            z += of_gate[None, :]
            if SCANS:
                total += of_x[None, :]
        a, slope = _activate(z, GELU)
        if BACKWARD:
            grad = load(do, tokens, last, do_strides[1], channels, D).to(ACC)
            inner = grad * total * slope
            store(dgate, tokens, last, dgate_strides[1], channels, D, inner)
            for r in tl.static_range(SCANS):
                store(dx + r * dx_step, tokens, last, dx_strides[1], channels, D, grad * a)
            if BIAS:
                sum_gate += inner
                sum_x += grad * a
        else:
            store(out, tokens, last, D, channels, D, total * a)
    if BIAS and BACKWARD:
        sums += tl.program_id(0).to(tl.int64) * (1 + SCANS) * D + channels
        tl.store(sums, tl.sum(sum_gate, axis=0), mask=channels < D)
        if SCANS:
            tl.store(sums + D, tl.sum(sum_x, axis=0), mask=channels < D)


# -------------------------------------------------------------------------------------------- host


def config(dim: int) -> dict[str, int]:
    """Options to compile the kernel for `dim` channels with; the same for all dtypes and GPUs."""
    channels = min(max(_launch.power_of_2(dim), 16), 128)
    return {'TOKENS': 2048 // channels, 'CHANNELS': channels, 'num_warps': 4}


unsupported_reason = _launch.unsupported_reason


def _launch_on(
    x: Tensor, gate: Tensor, bias: Tensor | None, activation: str, **tensors: Tensor
) -> Tensor | None:
    """Launches the kernel; returns the sums over the tokens, if there are any."""
    batch, tokens, scans, dim = x.shape
    options = config(dim)
    columns = _launch.cdiv(dim, options['CHANNELS'])
    splits, span = _launch.cdiv(tokens, options['TOKENS']), options['TOKENS']
    sums = None
    if bias is not None and 'do' in tensors:
        splits, span = _launch.split(tokens, batch * columns, options['TOKENS'])
        sums = x.new_empty((1, batch * splits, 1 + scans, dim), dtype=state_dtype(x.dtype))
    unused = {'do': gate, 'out': gate, 'dx': x, 'dgate': gate}
    strided = {n: y for n, y in (unused | tensors).items() if n != 'out'}
    with torch.cuda.device_of(x):
        _gated[(batch * splits, columns)](
            **_launch.with_strides(x=x, gate=gate, **strided),
            bias=gate if bias is None else bias.contiguous(),
            out=tensors.get('out', gate),
            sums=gate if sums is None else sums,
            D=dim,
            N=tokens,
            span=span,
            splits=splits,
            SCANS=scans,
            BIAS=bias is not None,
            GELU=activation == 'gelu',
            BACKWARD='do' in tensors,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            **options,
        )
    return None if sums is None else _launch.add_up(sums)[0]


def forward(x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str) -> Tensor:
    """The output, arguments as the reference's."""
    x, gate = apart(x, gate)
    out = gate.new_empty(gate.shape)
    _launch_on(x, gate, bias, activation, out=out)
    return out


def backward(
    do: Tensor, x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and bias, as the reference's."""
    grads = x.new_empty(x.shape), x.new_empty(0 if gate is None else gate.shape)
    dx, dgate = apart(grads[0], None if gate is None else grads[1])
    x, gate = apart(x, gate)
    sums = _launch_on(x, gate, bias, activation, do=do, dx=dx, dgate=dgate)
    return *grads, x.new_empty(0, dtype=state_dtype(x.dtype)) if sums is None else sums
