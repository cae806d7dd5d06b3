"""A block of Vittt in one page of PyTorch (Vision-TTT, Algorithm 1 and App. A).

    python examples/minimal_vittt.py

The names of the parameters are mmvttt.Vittt's: the state dict of a block loads as it is, and
tests/examples compares the outputs. Nothing here is fast; kernels/ttt_linear is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens `(B, T, 2, D)`, taps `(2, D, 4)`: each token and the three before it in its scan."""
    forward, backward = x[:, :, 0].mT, x[:, :, 1].flip(1).mT  # (B, D, T), in scan order
    forward, backward = (
        F.conv1d(F.pad(y, (3, 0)), w[:, None], groups=len(w)).mT
        for y, w in zip((forward, backward), weight, strict=True)
    )
    return torch.stack([forward, backward.flip(1)], 2)


def train_and_read(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, tau: Tensor, w: Tensor, c: Tensor, ln: nn.Module
) -> Tensor:
    """Trains f(x) = x + LN(x W + c) along the tokens of one scan, and reads it.

    The training pair of a token is (k, v), the loss ½‖f(k) − v‖². Gradients are taken at the state
    with which a mini-batch of b tokens begins; the t-th token is read after t steps of τ_t·η.

    Args:
        q, k, v: `(B, H, T, d)` in scan order.
        eta: `(B, H, T)` step of each token.
        tau: `(b,)` factor of the t-th token of a mini-batch.
        w, c: `(H, d, d)` and `(H, 1, d)`: the weights to begin with.
        ln: LayerNorm of the heads.
    """
    w, c = w.expand(len(q), -1, -1, -1), c.expand(len(q), -1, -1, -1)  # one model an image
    outs = []
    for q_b, k_b, v_b, eta_b in zip(*(x.split(len(tau), 2) for x in (q, k, v, eta)), strict=True):
        # The gradient with respect to z = kW + c, (B, H, b, d); for W it is kᵀ g, for c it is g.
        g = grad(lambda z, k=k_b, v=v_b: (k + ln(z) - v).square().sum() / 2)(k_b @ w + c)
        t = len(tau[: q_b.shape[2]])
        step = (tau[:t, None] * eta_b[..., None, :]).tril()  # (B, H, b, b): of token s, read at t
        z = q_b @ w + c - (step * (q_b @ k_b.mT + 1)) @ g
        outs.append(q_b + ln(z))
        last = step[..., -1, :, None]
        w, c = w - (last * k_b).mT @ g, c - (last * g).sum(2, keepdim=True)
    return torch.cat(outs, 2)


class HeadNorm(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias  # (H, d)

    def forward(self, z: Tensor) -> Tensor:
        """`(B, H, b, d)` → the same."""
        return F.layer_norm(z, z.shape[-1:], eps=1e-6) * self.weight[:, None] + self.bias[:, None]


class Conv(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, dims, 4) / 2)


class Mixer(nn.Module):
    def __init__(self, dims: int, heads: int, mini_batch: int = 16) -> None:
        super().__init__()
        d = dims // heads
        self.heads = heads
        # q = k, and v, of two scans; the gate; the step of every scan and head
        self.widths = [2 * dims, 2 * dims, dims, 2 * heads]
        self.in_proj = nn.Linear(dims, sum(self.widths), bias=False)
        self.eta_bias = nn.Parameter(torch.zeros(2 * heads))
        self.q_conv, self.k_conv = Conv(dims), Conv(dims)
        self.token_scale = nn.Parameter(torch.zeros(2, mini_batch))
        self.w0 = nn.Parameter(0.02 * torch.randn(2, heads, d, d))
        self.b0 = nn.Parameter(torch.zeros(2, heads, d))
        self.ln_weight = nn.Parameter(torch.ones(2, heads, d))
        self.ln_bias = nn.Parameter(torch.zeros(2, heads, d))
        self.proj = nn.Linear(dims, dims, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normed tokens `(B, T, D)` → `(B, T, D)`."""
        qk, v, gate, eta = self.in_proj(x).split(self.widths, -1)
        qk, v = qk.unflatten(-1, (2, -1)), v.unflatten(-1, (2, -1))  # (B, T, 2, D)
        q, k = causal_conv(qk, self.q_conv.weight), causal_conv(qk, self.k_conv.weight)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))  # (B, T, 2, H, d)
        eta = (eta + self.eta_bias).unflatten(-1, (2, -1)).sigmoid() / q.shape[-1]  # (B, T, 2, H)
        t = torch.arange(1, self.token_scale.shape[1] + 1).to(self.token_scale)
        tau = (1 / t + self.token_scale).clamp(min=0)  # (2, b)
        out = 0
        for scan in (0, 1):
            order = (lambda y: y.flip(1)) if scan else (lambda y: y)  # the second from the end
            q_s, k_s, v_s, eta_s = (order(y[:, :, scan]).transpose(1, 2) for y in (q, k, v, eta))
            norm = HeadNorm(self.ln_weight[scan], self.ln_bias[scan])
            c = self.b0[scan, :, None]
            read = train_and_read(q_s, k_s, v_s, eta_s, tau[scan], self.w0[scan], c, norm)
            out = out + order(read.transpose(1, 2)).flatten(2)
        return self.proj(out * F.gelu(gate))


class SwiGLU(nn.Module):
    def __init__(self, dims: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dims, 2 * hidden), nn.Linear(hidden, dims)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * value)


class Block(nn.Module):
    """Convolution, mixer and MLP with a residual each (Eq. 9)."""

    def __init__(self, dims: int = 192, heads: int = 3, hidden: int = 512) -> None:
        super().__init__()
        self.conv2d = nn.Conv2d(dims, dims, 3, padding=1, groups=dims, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(dims, eps=1e-6), nn.LayerNorm(dims, eps=1e-6)
        self.mixer = Mixer(dims, heads)
        self.mlp = SwiGLU(dims, hidden)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, h·w, D)` of an `(h, w)` map → `(B, h·w, D)`."""
        x = x + self.conv2d(x.mT.unflatten(2, hw)).flatten(2).mT
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


if __name__ == '__main__':
    tokens = Block()(torch.randn(2, 14 * 14, 192), (14, 14))
    print(f'{tuple(tokens.shape)}: a trained model at every token')
