"""The ops in operators that exporters know: torch's own and its `scan`, sizes left symbolic.

For `torch.export.ExportedProgram.run_decompositions`, and with it for ONNX. Forward passes only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from ._inner_step import damped
from ._inputs import state_dtype
from .causal_conv import reference as convolution
from .deform_attn.reference import sum_dtype
from .ttt_dwconv import reference as dwconv
from .ttt_glu import reference as glu
from .ttt_linear.reference import Inputs, scan_order
from .ttt_mlp import reference as mlp


def decompositions() -> dict[Any, Callable]:
    """Decompositions of the forward pass of every op of this package, by overload."""
    ops = torch.ops.ttt_kernels
    return {
        ops.ttt_linear.default: _ttt_linear,
        # The last argument, the backend, has no meaning outside of this package.
        ops.ttt_glu.default: lambda *args: glu.forward(*args[:-1]),
        ops.ttt_dwconv.default: _ttt_dwconv,
        ops.ttt_mlp.default: lambda *args: mlp.forward(*args[:-1]),
        ops.causal_conv.default: _causal_conv,
        ops.deform_attn.default: _deform_attn,
    }


def _ttt_linear(*args: Any) -> tuple[Tensor, ...]:
    """`ttt_linear.reference.dual` with a scan over the mini-batches in place of its loop."""
    # Behind them stand the backend, and what the backward pass needs.
    *tensors, directions, size, eps = args[:12]
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = Inputs(*tensors)
    batch, tokens, scans = q.shape[:3]
    count = (tokens + size - 1) // size

    def chunks(x: Tensor) -> Tensor:
        """`(B, T, R, H, …)` → `(n, B, R, H, b, …)`; the zero steps of the tail change nothing."""
        x = scan_order(x.to(state_dtype(x.dtype)), directions)
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, count * size - tokens))
        return x.unflatten(1, (count, size)).movedim((1, 2), (0, 4))

    tau = w0.new_ones(scans, size) if token_scale is None else token_scale
    start = [x.expand(batch, *x.shape).clone() for x in (w0, b0.unsqueeze(-2))]
    fixed = [ln_weight.unsqueeze(-2), ln_bias.unsqueeze(-2), tau[:, None, :, None]]

    def step(*operands: Tensor) -> list[Tensor]:
        w, c, q, k, v, eta, weight, bias, tau = operands
        z = k @ w + c
        variance, mean = torch.var_mean(z, -1, correction=0, keepdim=True)
        rstd = (variance + eps).rsqrt()
        x = (z - mean) * rstd
        p = weight * (weight * x + bias - (v - k))
        g = (p - p.mean(-1, keepdim=True) - x * (p * x).mean(-1, keepdim=True)) * rstd
        e = (tau * eta.unsqueeze(-2)).tril()
        zq = q @ w + c - (e * (q @ k.mT + 1)) @ g
        variance, mean = torch.var_mean(zq, -1, correction=0, keepdim=True)
        out = q + weight * (zq - mean) * (variance + eps).rsqrt() + bias
        last = tau[..., -1:, :] * eta.unsqueeze(-1)
        return [w - (last * k).mT @ g, c - (last * g).sum(-2, keepdim=True), out]

    out = scan_op(step, start, [chunks(x) for x in (q, k, v, eta)], fixed)[-1]
    out = out.movedim((0, 4), (1, 2)).flatten(1, 2)[:, :tokens]
    nothing = q.new_empty(0)
    return scan_order(out, directions).to(q.dtype), nothing, nothing, nothing


def _ttt_dwconv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    h: int,
    w: int,
    scale: float,
    damping: bool,
    _backend: str,
) -> tuple[Tensor, Tensor]:
    """`ttt_dwconv.reference.forward`, which adds up in place."""
    dtype, state = q.dtype, state_dtype(q.dtype)
    q, k, v = (x.to(state).unflatten(1, (h, w)) for x in (q, k, v))
    g = dwconv.products(k, v) * (-scale / (h * w))
    taps = w3.flatten(1).mT - (damped(g, 1) if damping else g)
    out = sum(x * taps[:, tap, None, None] for tap, x in dwconv.shifted(q))
    return out.flatten(1, 2).to(dtype), g


def _causal_conv(
    x: Tensor, weight: Tensor, other: Tensor | None, ways: str, _backend: str
) -> tuple[Tensor, Tensor]:
    """By the definition."""
    y, z = (
        x.new_empty(0) if w is None else convolution.primal(x, w, ways) for w in (weight, other)
    )
    return y, z


def _deform_attn(
    value: Tensor,
    shapes: Sequence[int],
    levels: Tensor | None,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    _backend: str,
) -> Tensor:
    """By `grid_sample`, level after level."""
    if levels is not None:
        raise NotImplementedError('deform_attn: spatial_shapes in a tensor cannot be exported')
    wide = sum_dtype(value.dtype)
    batch, _, heads, _ = value.shape
    places, weights = places.to(wide), weights.to(wide)
    if reference_points is not None:
        weights = weights.flatten(-2).softmax(-1).view(weights.shape)
    weights = weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)  # (B·H, 1, Q, L, P)
    maps = value.to(wide).permute(0, 2, 3, 1).flatten(0, 1)  # (B·H, d, S)
    total, start = 0, 0
    for level in range(len(shapes) // 2):
        h, w = shapes[2 * level : 2 * level + 2]
        x, y = places[:, :, :, level].unbind(-1)  # (B, Q, H, P)
        if reference_points is not None:
            centre = reference_points[:, :, level, :, None, None]
            x, y = centre[:, :, 0] + x / w, centre[:, :, 1] + y / h
        grid = (2 * torch.stack((x, y), -1) - 1).transpose(1, 2).flatten(0, 1)
        pixels = maps[..., start : start + h * w].unflatten(-1, (h, w))
        samples = F.grid_sample(pixels, grid, align_corners=False)
        total = total + (samples * weights[..., level, :]).sum(-1)
        start += h * w
    return total.unflatten(0, (batch, heads)).flatten(1, 2).mT.contiguous().to(value.dtype)
