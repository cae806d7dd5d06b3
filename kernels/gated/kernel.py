"""Triton kernels of a sum of branches times an activated gate: one pass, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
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


@triton.jit(do_not_specialize=['N'])
def _gated(
    x,  # (B, N, SCANS, D), any strides but the last
    gate,  # (B, N, D), likewise
    do,  # likewise
    out,  # (B, N, D)
    dx,  # (B, N, SCANS, D), likewise
    dgate,  # (B, N, D), likewise
    x_strides,
    gate_strides,
    do_strides,
    dx_strides,
    dgate_strides,
    D,
    N,
    SCANS: tl.constexpr,
    GELU: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile of tokens and channels: the output, or the gradients of x and gate."""
    blocks = tl.cdiv(N, TOKENS)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x += image * x_strides[0]
    z = load(gate + image * gate_strides[0], tokens, N, gate_strides[1], channels, D).to(ACC)
    total = load(x, tokens, N, x_strides[1], channels, D).to(ACC)
    for r in tl.static_range(1, SCANS):
        total += load(x + r * x_strides[2], tokens, N, x_strides[1], channels, D).to(ACC)
    a, slope = _activate(z, GELU)
    if BACKWARD:
        dx += image * dx_strides[0]
        dgate += image * dgate_strides[0]
        grad = load(do + image * do_strides[0], tokens, N, do_strides[1], channels, D).to(ACC)
        store(dgate, tokens, N, dgate_strides[1], channels, D, grad * total * slope)
        for r in tl.static_range(SCANS):
            store(dx + r * dx_strides[2], tokens, N, dx_strides[1], channels, D, grad * a)
    else:
        store(out + image * N * D, tokens, N, D, channels, D, total * a)


# -------------------------------------------------------------------------------------------- host


def config(dim: int) -> dict[str, int]:
    """Options to compile the kernel for `dim` channels with; the same for all dtypes and GPUs."""
    channels = min(max(_launch.power_of_2(dim), 16), 128)
    return {'TOKENS': 2048 // channels, 'CHANNELS': channels, 'num_warps': 4}


unsupported_reason = _launch.unsupported_reason


def _launch_on(x: Tensor, gate: Tensor, activation: str, **tensors: Tensor) -> None:
    batch, tokens, scans, dim = x.shape
    options = config(dim)
    grid = (
        batch * _launch.cdiv(tokens, options['TOKENS']),
        _launch.cdiv(dim, options['CHANNELS']),
    )
    unused = {'do': gate, 'out': gate, 'dx': x, 'dgate': gate}
    strided = {n: y for n, y in (unused | tensors).items() if n != 'out'}
    with torch.cuda.device_of(x):
        _gated[grid](
            **_launch.with_strides(x=x, gate=gate, **strided),
            out=tensors.get('out', gate),
            D=dim,
            N=tokens,
            SCANS=scans,
            GELU=activation == 'gelu',
            BACKWARD='do' in tensors,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            **options,
        )


def forward(x: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """The output, arguments as the reference's."""
    x, gate = apart(x, gate)
    out = gate.new_empty(gate.shape)
    _launch_on(x, gate, activation, out=out)
    return out


def backward(do: Tensor, x: Tensor, gate: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of x and gate, as the reference's."""
    grads = x.new_empty(x.shape), x.new_empty(0 if gate is None else gate.shape)
    dx, dgate = apart(grads[0], None if gate is None else grads[1])
    x, gate = apart(x, gate)
    _launch_on(x, gate, activation, do=do, dx=dx, dgate=dgate)
    return grads
