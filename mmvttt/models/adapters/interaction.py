"""Interaction between a plain backbone and the spatial prior (ViT-Adapter, Sec. 3.3 and 3.4)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backbones.base import run
from ..layers.conv import to_map
from ..layers.drop_path import DropPath
from .deformable_attention import DeformableAttention, SamplingGrid

_LN_EPS = 1e-6


def split_levels(pyramid: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Pyramid `(B, S, C)` → its maps `(B, C, h, w)`, for S the cells of all `sizes` (h, w)."""
    parts = pyramid.split([height * width for height, width in sizes], dim=1)
    return [to_map(x, size) for x, size in zip(parts, sizes, strict=True)]


def join_levels(maps: Sequence[Tensor]) -> Tensor:
    """Maps `(B, C, h, w)` → pyramid `(B, S, C)`, the inverse of `split_levels`."""
    return torch.cat([x.permute(0, 2, 3, 1).flatten(1, 2) for x in maps], dim=1)


class ConvFFN(nn.Module):
    """MLP with a depth-wise 3×3 convolution on each level before its GELU."""

    def __init__(self, embed_dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dims, hidden_dims)
        self.dwconv = nn.Conv2d(hidden_dims, hidden_dims, 3, padding=1, groups=hidden_dims)
        self.fc2 = nn.Linear(hidden_dims, embed_dims)
        for linear in (self.fc1, self.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # Fan-out of a depth-wise convolution: the nine taps of its own channel.
        nn.init.normal_(self.dwconv.weight, std=(2 / 9) ** 0.5)
        nn.init.zeros_(self.dwconv.bias)

    def forward(self, pyramid: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Pyramid `(B, S, C)` of levels of `sizes` (h, w), S their cells, → `(B, S, C)`."""
        hidden = join_levels([self.dwconv(x) for x in split_levels(self.fc1(pyramid), sizes)])
        return self.fc2(F.gelu(hidden))


class _Reader(nn.Module):
    """Deformable attention from normed queries to normed values, `attn(LN(q), LN(v))`."""

    def __init__(self, embed_dims: int, num_levels: int, attention: dict) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(embed_dims, eps=_LN_EPS)
        self.value_norm = nn.LayerNorm(embed_dims, eps=_LN_EPS)
        self.attention = DeformableAttention(embed_dims, num_levels=num_levels, **attention)

    def read(self, queries: Tensor, values: Tensor, grid: SamplingGrid) -> Tensor:
        return self.attention(self.query_norm(queries), self.value_norm(values), grid)


class Injector(_Reader):
    """Injects the pyramid into the backbone's tokens: `x + γ · attn(LN(x), LN(c))`.

    γ starts at 0: training starts from exactly the backbone's own features.
    """

    def __init__(self, embed_dims: int, num_levels: int, attention: dict) -> None:
        super().__init__(embed_dims, num_levels, attention)
        self.gamma = nn.Parameter(torch.zeros(embed_dims))

    def forward(self, tokens: Tensor, pyramid: Tensor, grid: SamplingGrid) -> Tensor:
        return tokens + self.gamma * self.read(tokens, pyramid, grid)


class Extractor(_Reader):
    """Adds the backbone's tokens to the pyramid, then a conv-FFN.

    `c ← c + attn(LN(c), LN(x))`, then `c ← c + DropPath(FFN(LN(c)))`.
    """

    def __init__(
        self, embed_dims: int, ffn_dims: int, drop_path_rate: float, attention: dict
    ) -> None:
        super().__init__(embed_dims, 1, attention)
        self.ffn_norm = nn.LayerNorm(embed_dims, eps=_LN_EPS)
        self.ffn = ConvFFN(embed_dims, ffn_dims)
        self.drop_path = DropPath(drop_path_rate)

    def forward(
        self,
        pyramid: Tensor,
        tokens: Tensor,
        grid: SamplingGrid,
        sizes: Sequence[tuple[int, int]],
    ) -> Tensor:
        pyramid = pyramid + self.read(pyramid, tokens, grid)
        return pyramid + self.drop_path(self.ffn(self.ffn_norm(pyramid), sizes))


class Interaction(nn.Module):
    """One injector before, and one or more extractors after, a group of the backbone's blocks.

    Args:
        injector: The injector.
        extractors: The extractors, one after the other.
        with_cp: Recompute them in the backward pass (non-reentrant checkpointing). The backbone's
            blocks have a `with_cp` of their own.
    """

    def __init__(
        self, injector: Injector, extractors: Sequence[Extractor], with_cp: bool = False
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.injector = injector
        self.extractors = nn.ModuleList(extractors)

    def inject(self, tokens: Tensor, pyramid: Tensor, grid: SamplingGrid) -> Tensor:
        """Tokens `(B, T, C)` → the same shape, with the pyramid `(B, S, C)` injected.

        `grid` has the tokens as queries, the levels of the pyramid as values.
        """
        return run(self.injector, self.with_cp, tokens, pyramid, grid)

    def extract(
        self,
        pyramid: Tensor,
        tokens: Tensor,
        grid: SamplingGrid,
        sizes: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Pyramid `(B, S, C)` of `sizes` (h, w) → the same shape, with tokens `(B, T, C)` added.

        `grid` has the cells of the pyramid as queries, the tokens as values.
        """
        for extractor in self.extractors:
            pyramid = run(extractor, self.with_cp, pyramid, tokens, grid, sizes)
        return pyramid
