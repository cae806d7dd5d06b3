"""TTT-linear by its definition: the executable specification of Vittt's mini-batch scan (App. A).

`primal` takes one token at a time, with gradients of the inner loss by autograd; `dual` takes a
mini-batch at a time, in matrix products. Both are differentiable by autograd.

Vectors are rows: `Z = K W + c`. Each scan r reads its tokens from the first to the last
('f' in `directions`) or from the last to the first ('b'), and everything is indexed by the
token's own position. The step of token s in the state of token t, s ≤ t in one mini-batch,
is `τ_t·ℓ_s` (`token_scale`, `eta`), and the state after a mini-batch is its last token's, with
steps τ_b·ℓ_s.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inputs import state_dtype
from .._op import Args


class Inputs(NamedTuple):
    """The tensors of a scan, in the order of the op's arguments."""

    q: Tensor  # (B, T, R, H, d)
    k: Tensor
    v: Tensor
    eta: Tensor  # (B, T, R, H)
    w0: Tensor  # (R, H, d, d)
    b0: Tensor  # (R, H, d)
    ln_weight: Tensor
    ln_bias: Tensor
    token_scale: Tensor | None  # (R, mini_batch_size); None is ones


def parts(args: Args) -> tuple[Inputs, Args]:
    """The tensors of the op's arguments, and `directions`, `mini_batch_size` and `eps`."""
    count = len(Inputs._fields)
    return Inputs(*args[:count]), args[count:]


def scan_order(x: Tensor, directions: str) -> Tensor:
    """Tokens `(B, T, R, …)` in the order in which each scan reads them; its own inverse."""
    if 'b' not in directions:
        return x
    scans = [x[:, :, r].flip(1) if way == 'b' else x[:, :, r] for r, way in enumerate(directions)]
    return torch.stack(scans, dim=2)


def primal(inputs: Inputs, directions: str, mini_batch_size: int, eps: float = 1e-6) -> Tensor:
    """The literal definition, token by token (App. A.1): slow, differentiable.

    f(x) = x + LN(xW + c) (App. B, Remarks), and the inner loss is ½‖f(k) − v‖².

    Returns:
        O, `(B, T, R, H, d)`.
    """
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    batch, tokens, _, _, dim = q.shape
    dtype, state = q.dtype, state_dtype(q.dtype)
    q, k, v, eta = (scan_order(x.to(state), directions) for x in (q, k, v, eta))

    def f(w: Tensor, c: Tensor, x: Tensor) -> Tensor:
        z = (x.unsqueeze(-2) @ w).squeeze(-2) + c
        return x + F.layer_norm(z, (dim,), eps=eps) * ln_weight + ln_bias

    def loss(w: Tensor, c: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # A sum over independent problems: its gradient contains each problem's own.
        return (f(w, c, key) - value).square().sum() / 2

    descent = torch.func.grad(loss, argnums=(0, 1))
    w, c = w0.expand(batch, *w0.shape), b0.expand(batch, *b0.shape)
    outputs = []
    for start in range(0, tokens, mini_batch_size):
        sum_w, sum_c = torch.zeros_like(w), torch.zeros_like(c)
        for t in range(start, min(start + mini_batch_size, tokens)):
            grad_w, grad_c = descent(w, c, k[:, t], v[:, t])
            sum_w = sum_w + eta[:, t, :, :, None, None] * grad_w
            sum_c = sum_c + eta[:, t, :, :, None] * grad_c
            scale = w0.new_ones(1) if token_scale is None else token_scale[:, t - start]
            scale = scale.view(-1, 1, 1)
            outputs.append(f(w - scale[..., None] * sum_w, c - scale * sum_c, q[:, t]))
        # Only a full mini-batch has a successor, so `scale` is τ_b here whenever it matters.
        w, c = w - scale[..., None] * sum_w, c - scale * sum_c
    return scan_order(torch.stack(outputs, dim=1), directions).to(dtype)


def dual(inputs: Inputs, directions: str, mini_batch_size: int, eps: float = 1e-6) -> Tensor:
    """The dual form, a mini-batch at a time (App. A.2); differentiable by autograd.

    Returns:
        O, `(B, T, R, H, d)`.
    """
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    tokens, dim = q.shape[1], q.shape[-1]
    dtype, state = q.dtype, state_dtype(q.dtype)
    # (B, R, H, T, …), in scan order
    q, k, v, eta = (scan_order(x.to(state), directions).movedim(1, 3) for x in (q, k, v, eta))
    tau = w0.new_ones(len(w0), mini_batch_size) if token_scale is None else token_scale
    tau = tau[:, None]
    weight, bias = ln_weight[:, :, None], ln_bias[:, :, None]
    w, c = w0, b0[:, :, None]
    outputs = []
    for start in range(0, tokens, mini_batch_size):
        qi, ki, vi, step = (x[:, :, :, start : start + mini_batch_size] for x in (q, k, v, eta))
        size = qi.shape[3]
        z = ki @ w + c
        x = F.layer_norm(z, (dim,), eps=eps)
        sigma = (z.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
        p = weight * (weight * x + bias - (vi - ki))
        g = (p - p.mean(-1, keepdim=True) - x * (p * x).mean(-1, keepdim=True)) / sigma
        e = (tau[:, :, :size, None] * step[..., None, :]).tril()
        zq = qi @ w + c - (e * (qi @ ki.mT + 1)) @ g
        outputs.append(qi + weight * F.layer_norm(zq, (dim,), eps=eps) + bias)
        last = (tau[:, :, -1:] * step)[..., None]
        w, c = w - (last * ki).mT @ g, c - (last * g).sum(-2, keepdim=True)
    return scan_order(torch.cat(outputs, dim=3).movedim(3, 1), directions).to(dtype)
