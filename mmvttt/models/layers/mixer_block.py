"""The contract of token mixers, and the blocks around them (vit3 Fig. 2)."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from mmengine import registry as root
from torch import Tensor, nn

from mmvttt.arguments import check_config
from mmvttt.registry import MODELS, resolve, resolve_type

from .conv import DWConv2d
from .drop_path import DropPath

_OWN_MIXERS = ('TTTLinearMixer', 'TTTMixer', 'ViT3Mixer')


def resolve_mixer(mixer: Mapping | None, default: Mapping) -> dict[str, Any]:
    """Config of a backbone's mixer: the user's options over the default's.

    The default's options hold for its own type, whichever way that is written; another type has
    none but the user's.

    Args:
        mixer: Options of the default's mixer, or `dict(type=…)` of any registered one and its
            options, without channels and heads; None for the default.
        default: The backbone's mixer.

    Returns:
        The config, with a class for its type.

    Raises:
        TypeError: If `mixer` is no dict.
        ValueError: If the type is not registered.
    """
    own = _mixer_class(default['type'])
    if mixer is None:
        mixer = {}
    check_config('mixer', mixer, f"dict(type='mmvttt.{own.__name__}')")
    kind = _mixer_class(mixer.get('type', own))
    options = {**default, **mixer} if kind is own else dict(mixer)
    return dict(options, type=kind)


def _mixer_class(kind: Any) -> Any:
    # Our own names need no scope, whatever the default scope is.
    found = resolve_type(kind, root.MODELS, None) if isinstance(kind, str) else None
    return found or resolve('the type of mixer', kind, MODELS, _OWN_MIXERS)


def build_mixer(
    config: Mapping, embed_dims: int, num_heads: int, extras: Collection[str] = ()
) -> tuple[nn.Module, tuple[str, ...]]:
    """A token mixer: a module `mixer(x, hw, …)` from tokens `(B, T, C)` to tokens `(B, T, C)`.

    Args:
        config: Config of any registered module, without channels and heads.
        embed_dims: Channels C, its argument of that name.
        num_heads: Heads, likewise.
        extras: Names of what its backbone knows beyond the tokens and the size of their map.

    Returns:
        The mixer, and those of `extras` that its `forward` names.

    Raises:
        TypeError: If its `forward` needs an argument that is not there.
    """
    mixer = MODELS.build(dict(config, embed_dims=embed_dims, num_heads=num_heads))
    parameters = inspect.signature(mixer.forward).parameters
    for name in list(parameters)[2:]:
        parameter = parameters[name]
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in extras and not variadic and parameter.default is parameter.empty:
            known = ', '.join(extras) or 'nothing'
            raise TypeError(
                f'{type(mixer).__name__}.forward needs {name!r}, of which its backbone knows '
                f'nothing: give it a default; beyond (x, hw) there is here: {known}.'
            )
    return mixer, tuple(name for name in extras if name in parameters)


class TokenBlock(nn.Module):
    """Mixer and feed-forward, behind a LayerNorm and with a residual each.

    A subclass fills in `mlp` and `drop_path`, and what is in front of the mixer.

    Attributes:
        mixer_extras: What the mixer is told beyond its tokens and the size of their map.
    """

    mlp: nn.Module
    drop_path: nn.Module

    def add_mixer(
        self,
        config: Mapping,
        embed_dims: int,
        num_heads: int,
        norm_eps: float,
        extras: Collection[str],
    ) -> None:
        """Registers the mixer of `build_mixer` between the two norms."""
        self.norm1 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.mixer, self.mixer_extras = build_mixer(config, embed_dims, num_heads, extras)
        self.norm2 = nn.LayerNorm(embed_dims, eps=norm_eps)

    def mix(self, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """The mixer's branch on normed tokens `(B, T, C)`, with those of `extras` that it names."""
        named = {name: extras[name] for name in self.mixer_extras}
        return self.drop_path(self.mixer(x, hw, **named))

    def feed_forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, T, C)` plus their feed-forward."""
        return x + self.drop_path(self.mlp(self.norm2(x), hw))


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
        extras: Names of what `forward` is given for the mixer.
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
        self.add_mixer(mixer, embed_dims, num_heads, norm_eps, extras)
        self.mlp = FeedForward(embed_dims, feedforward_channels, dwconv)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """Tokens `(B, h·w, C)` of an `(h, w)` map → `(B, h·w, C)`; see `build_mixer`."""
        if self.cpe is not None:
            x = x + self.cpe(x, hw)
        x = x + self.mix(self.norm1(x), hw, **extras)
        return self.feed_forward(x, hw)
