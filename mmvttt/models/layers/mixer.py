"""The contract of token mixers, and the parts that all blocks share.

A token mixer is a module that is built as `Mixer(embed_dims=…, num_heads=…, **options)` and called
as `mixer(x, hw)`: tokens `(B, T, C)` and the size `(h, w)` of their map in, tokens out. It declares
further inputs by name, `extras = ('rotation',)`, and gets them as keyword arguments from blocks
that have them.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from mmvttt.arguments import check_config
from mmvttt.errors import OptionTypeError
from mmvttt.on_demand import OnDemand

from ..build import build_part, find_part

# The library's token mixers. A model imports the one that it has.
MIXERS = OnDemand(
    __package__,
    ttt_linear_mixer='TTTLinearMixer',
    ttt_mixer='TTTMixer',
    vit3_mixer='ViT3Mixer',
)
# A class, a callable, a name, or a dict of options with or without a type.
Mixer = str | Mapping[str, Any] | Callable[..., nn.Module]


def resolve_mixer(mixer: Mixer | None, default: Mapping[str, Any]) -> dict[str, Any]:
    """Config of a model's mixer, with a class or callable for its type.

    The user's options override the default's, which apply only to the default's type, whether it is
    given as a class or by name. Channels and heads are not among them.
    """
    usual = find_part('mixer', default['type'], MIXERS)
    if mixer is None:
        mixer = {}
    elif isinstance(mixer, str) or callable(mixer):
        mixer = dict(type=mixer)
    check_config('mixer', mixer, f"dict(type='{usual.__name__}')")
    kind = find_part('mixer', mixer.get('type', usual), MIXERS)
    options = {**default, **mixer} if kind is usual else dict(mixer)
    return dict(options, type=kind)


def build_mixer(
    config: Mapping[str, Any], embed_dims: int, num_heads: int, extras: Collection[str] = ()
) -> tuple[nn.Module, tuple[str, ...]]:
    """The mixer of a config of `resolve_mixer`, and the names of `extras` that it declares.

    `extras` are names of the block's inputs beyond the tokens and the size of their map.

    Raises:
        TypeError: If it is not a module, or its extras are not a tuple.
    """
    options = {name: value for name, value in config.items() if name != 'type'}
    mixer = build_part(
        'mixer',
        find_part('mixer', config['type'], MIXERS),
        embed_dims=embed_dims,
        num_heads=num_heads,
        **options,
    )
    if not isinstance(mixer, nn.Module):
        raise OptionTypeError(
            f'mixer={config["type"]!r} made a {type(mixer).__name__}: give a class of modules.'
        )
    declared = getattr(mixer, 'extras', ())
    if isinstance(declared, str):
        raise OptionTypeError(
            f"{type(mixer).__name__}.extras={declared!r}: give a tuple, ('{declared}',)."
        )
    return mixer, tuple(name for name in declared if name in extras)


class TokenBlock(nn.Module):
    """Mixer and feed-forward, each with a LayerNorm before it and a residual.

    A subclass sets `mlp` and `drop_path`, and adds anything in front of the mixer.

    Attributes:
        mixer_extras: Names of the mixer's inputs beyond its tokens and the size of their map.
    """

    mlp: nn.Module
    drop_path: nn.Module

    def add_mixer(
        self,
        config: Mapping,
        embed_dims: int,
        num_heads: int,
        extras: Collection[str],
        norm_eps: float = 1e-6,
    ) -> None:
        """Registers the mixer of `build_mixer` between the two norms."""
        self.norm1 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.mixer, self.mixer_extras = build_mixer(config, embed_dims, num_heads, extras)
        self.norm2 = nn.LayerNorm(embed_dims, eps=norm_eps)

    def mix(self, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """The mixer's branch on normed tokens `(B, T, C)`, with the `extras` that it declares."""
        named = {name: extras[name] for name in self.mixer_extras}
        return self.drop_path(self.mixer(x, hw, **named))
