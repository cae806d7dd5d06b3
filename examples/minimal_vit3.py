"""A block of ViT³ in one page of PyTorch (ViT³, Sec. 5 and 9).

    python examples/minimal_vit3.py

The names of the parameters are mmvttt.ViT3's: the state dict of a block loads as it is, and
tests/examples compares the outputs. Nothing here is fast; kernels/ttt_glu and ttt_dwconv are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

SCALE = 1 / 3


def gated(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The inner model of a head: `(N, d)` → `(N, d)`."""
    return (x @ w['w1']) * F.silu(x @ w['w2'])


def train_and_read(w: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One step on all tokens `(N, d)` of a head of an image, then the queries (Eq. 5)."""

    def loss(w: dict[str, Tensor]) -> Tensor:
        return -SCALE / len(k) * (gated(w, k) * v).sum()

    # Each gradient over its norm plus one, column by column.
    steps = {n: g / (g.norm(dim=0, keepdim=True) + 1) for n, g in grad(loss)(w).items()}
    return gated({n: w[n] - steps[n] for n in w}, q)


def train_and_convolve(w: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for a depth-wise 3×3 convolution: kernels `(d, 3, 3)`, maps `(d, h, w)`."""

    def conv(w: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(x[None], w[:, None], padding=1, groups=len(w))[0]

    g = grad(lambda w: -SCALE / k[0].numel() * (conv(w, k) * v).sum())(w)
    return conv(w - g / (g.flatten(1).norm(dim=1)[:, None, None] + 1), q)


class Mixer(nn.Module):
    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        d = dims // heads
        self.dims, self.heads = dims, heads
        self.qkv = nn.Linear(dims, 3 * dims + 3 * d)  # of the gated heads, then of the convolution
        self.proj = nn.Linear(dims + d, dims)
        self.w1 = nn.Parameter(0.02 * torch.randn(heads, d, d))
        self.w2 = nn.Parameter(0.02 * torch.randn(heads, d, d))
        self.w3 = nn.Parameter(0.02 * torch.randn(d, 3, 3))

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Normed tokens `(B, h·w, C)` → `(B, h·w, C)`."""
        heads, local = self.qkv(x).split([3 * self.dims, 3 * len(self.w3)], -1)
        q, k, v = heads.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, d)
        weights = {'w1': self.w1, 'w2': self.w2}
        # Over the heads, whose weights differ, and over the images, which share them.
        read = vmap(vmap(train_and_read), in_dims=(None, 0, 0, 0))(weights, q, k, v)
        q, k, v = local.unflatten(-1, (3, -1)).permute(2, 0, 3, 1).unflatten(-1, hw)  # (B, d, h, w)
        near = vmap(train_and_convolve, in_dims=(None, 0, 0, 0))(self.w3, q, k, v)
        return self.proj(torch.cat([read.transpose(1, 2).flatten(2), near.flatten(2).mT], -1))


class MLP(nn.Module):
    def __init__(self, dims: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dims, hidden), nn.Linear(hidden, dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Conditional position encoding, mixer and MLP with a residual each (Fig. 2)."""

    def __init__(self, dims: int = 192, heads: int = 6, hidden: int = 768) -> None:
        super().__init__()
        self.cpe = nn.Conv2d(dims, dims, 3, padding=1, groups=dims)
        self.norm1, self.norm2 = nn.LayerNorm(dims, eps=1e-6), nn.LayerNorm(dims, eps=1e-6)
        self.mixer = Mixer(dims, heads)
        self.mlp = MLP(dims, hidden)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, h·w, C)` of an `(h, w)` map → `(B, h·w, C)`."""
        x = x + self.cpe(x.mT.unflatten(2, hw)).flatten(2).mT
        x = x + self.mixer(self.norm1(x), hw)
        return x + self.mlp(self.norm2(x))


if __name__ == '__main__':
    tokens = Block()(torch.randn(2, 14 * 14, 192), (14, 14))
    print(f'{tuple(tokens.shape)}: a model trained on each image')
