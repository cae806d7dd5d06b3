"""The block of ViT³, H-ViT³ and T⁵: local positions, TTT mixer, feed-forward (vit3 Fig. 2)."""

from collections.abc import Mapping

from torch import Tensor, nn

from mmvttt.arguments import check_config
from mmvttt.registry import MODELS

from .conv import DWConv2d
from .drop_path import DropPath


class FeedForward(nn.Module):
    """Linear, GELU, linear; with `dwconv`, a residual depth-wise 3×3 and a GELU in between.

    Args:
        embed_dims: Channels C.
        feedforward_channels: Hidden channels.
        dwconv: Whether the hidden map goes through `x + DWConv(x)` and GELU (H-ViT³).
    """

    def __init__(self, embed_dims: int, feedforward_channels: int, dwconv: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dims, feedforward_channels)
        self.dwconv = DWConv2d(feedforward_channels, bias=True) if dwconv else None
        self.act = nn.GELU()
        self.fc2 = nn.Linear(feedforward_channels, embed_dims)
        for linear in (self.fc1, self.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, h·w, C)` of an `(h, w)` map → `(B, h·w, C)`."""
        x = self.act(self.fc1(x))
        if self.dwconv is not None:
            x = self.act(x + self.dwconv(x, hw))
        return self.fc2(x)


class MixerBlock(nn.Module):
    """Conditional position encoding, mixer and feed-forward, each with a residual.

    Args:
        embed_dims: Channels C.
        num_heads: Heads of the mixer.
        feedforward_channels: Hidden channels of the feed-forward.
        mixer: Config of the mixer, without channels and heads.
        cpe: Whether the block begins with `x + DWConv3×3(x)`.
        dwconv: See `FeedForward`.
        drop_path: Rate at which whole samples skip mixer or feed-forward.
        norm_eps: ε of the two LayerNorms.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        feedforward_channels: int,
        mixer: Mapping,
        cpe: bool = True,
        dwconv: bool = False,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_config('mixer', mixer, "dict(type='mmvttt.ViT3Mixer')")
        self.cpe = DWConv2d(embed_dims, bias=True) if cpe else None
        self.norm1 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.mixer = MODELS.build(dict(mixer, embed_dims=embed_dims, num_heads=num_heads))
        self.norm2 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.mlp = FeedForward(embed_dims, feedforward_channels, dwconv)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, hw: tuple[int, int], *extra: Tensor) -> Tensor:
        """Tokens `(B, h·w, C)` of an `(h, w)` map → `(B, h·w, C)`; `extra` goes to the mixer."""
        if self.cpe is not None:
            x = x + self.cpe(x, hw)
        x = x + self.drop_path(self.mixer(self.norm1(x), hw, *extra))
        return x + self.drop_path(self.mlp(self.norm2(x), hw))
