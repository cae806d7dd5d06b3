"""The block of ViT³, H-ViT³ and T⁵ (vit3 Fig. 2)."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from .conv import DWConv2d
from .drop_path import DropPath
from .mixer import TokenBlock


class FeedForward(nn.Module):
    """Linear, GELU, linear, and with `dwconv` a residual depth-wise 3×3 and a GELU in between.

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


class MixerBlock(TokenBlock):
    """The block of ViT³, H-ViT³ and T⁵: conditional position encoding, mixer, feed-forward.

    Args:
        embed_dims: Channels C.
        num_heads: Heads of the mixer.
        feedforward_channels: Hidden channels of the feed-forward.
        mixer: Config of the mixer, see `build_mixer`.
        cpe: Whether the block begins with `x + DWConv3×3(x)`.
        dwconv: See `FeedForward`.
        drop_path: Rate at which whole samples skip mixer or feed-forward.
        norm_eps: ε of the two LayerNorms.
        extras: Names of the mixer's inputs that `forward` gets.
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
        extras: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.cpe = DWConv2d(embed_dims, bias=True) if cpe else None
        self.add_mixer(mixer, embed_dims, num_heads, extras, norm_eps)
        self.mlp = FeedForward(embed_dims, feedforward_channels, dwconv)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """Tokens `(B, h·w, C)` of an `(h, w)` map → `(B, h·w, C)`, with inputs of the mixer."""
        if self.cpe is not None:
            x = x + self.cpe(x, hw)
        x = x + self.mix(self.norm1(x), hw, **extras)
        return x + self.drop_path(self.mlp(self.norm2(x), hw))
