"""The contract of token mixers, and what all blocks around one share."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from mmengine import registry as root
from torch import Tensor, nn

from mmvttt.arguments import check_config
from mmvttt.registry import MODELS, resolve, resolve_type

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
