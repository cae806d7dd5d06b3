"""The module that replaces attention, and the size of the map, an argument of each call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from mmvttt.errors import OptionError

from ..layers.inner_options import InnerOptions
from ..layers.ttt_mixer import InnerTraining

# Why an attention that was replaced is not replaced again.
LINEAR = 'it is linearized already'
# Why 'all' leaves an attention out.
CROSS = 'it is cross-attention'
CAUSAL = 'it is causal'
NO_MAP = (
    'it is in no module that takes images and embeds their patches by a convolution (text, or '
    'packed sequences)'
)
TUBES = 'patches are embedded by a 3D convolution, in tubes of frames or packed sequences'
ASIDE = (CROSS, CAUSAL, NO_MAP, TUBES)


@dataclass(frozen=True)
class Note:
    """The record of a linearization, by which the model can be built again.

    Attributes:
        where: Names of the attentions that were replaced.
        options: Options of their replacements.
    """

    where: list[str]
    options: InnerOptions

    def to_json(self) -> dict[str, Any]:
        """Options of `linearize` as a config.json holds them."""
        return {'where': self.where, **self.options.to_json()}


class MapSize(NamedTuple):
    """Height and width of the map of tokens in one call of a model.

    Attention gets only `(B, N, C)`, and N = h·w determines neither h nor w. The size is an argument
    of the blocks, so that recomputation in the backward pass, other threads and other images get
    their own.
    """

    h: int
    w: int


class Replacement(InnerTraining):
    """The inner training that replaces a softmax attention.

    Args:
        embed_dims: Channels C of q, k and v.
        num_heads: Heads.
        attention: The attention, whose device, type of numbers and mode the new layers get.
        options: See `InnerTraining`.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, attention: nn.Module, **options: Any
    ) -> None:
        # Quantised weights are integers.
        weight = next((p for p in attention.parameters() if p.is_floating_point()), torch.empty(0))
        with torch.device(weight.device):
            super().__init__(embed_dims, num_heads, **options)
        self.to(weight.dtype).train(attention.training)
        # As timm's attentions have them: other code reads `block.attn.num_heads`.
        self.num_heads, self.head_dim = self.heads
        self._new_parts = {name.partition('.')[0] for name, _ in self.named_parameters()}

    if TYPE_CHECKING:
        # Layers of the attention that is replaced, by its names.
        def __getattr__(self, name: str) -> Any: ...

    def new_parameters(self) -> list[str]:
        """Names of the parameters that are initialised randomly, or of their copies in PEFT."""
        names = (name for name, _ in self.named_parameters())
        return [name for name in names if name.partition('.')[0] in self._new_parts]


# Builds the replacement of an attention from options, or says why it cannot be replaced.
Part: TypeAlias = Callable[..., Replacement] | str


def drop_map_size(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention that stays softmax, which takes no size."""
    return args, {name: v for name, v in kwargs.items() if not isinstance(v, MapSize)}


def checked_size(map_size: MapSize | None, tokens: Tensor, others: int) -> MapSize:
    """The size of the map of `(B, others + h·w, C)` tokens."""
    if map_size is None:
        raise OptionError(
            'A linearized attention does not know the size of its map: call the model on an image, '
            '`model(…)`, not its `forward`, and not a block on tokens. A `forward` of your own '
            'takes the tokens from `self.forward_features`.'
        )
    h, w = map_size
    if tokens.shape[1] != others + h * w:
        raise OptionError(
            f'{tokens.shape[1]} tokens are not a map of {h}×{w} and {others} others: a linearized '
            'attention needs all patches of an image (patch_drop_rate=0).'
        )
    return map_size


class Linearized(nn.Module):
    """Methods of a linearized model.

    `linearize` gives the model a subclass of this class and its own, as
    `torch.nn.utils.parametrize` does. Pickles name only the source's class.
    """

    source: type[nn.Module]
    if TYPE_CHECKING:
        # Parts of the source.
        def __getattr__(self, name: str) -> Any: ...

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self).__mro__[1], self.source), self.__getstate__()

    def no_weight_decay(self) -> set[str]:
        """Names that the source's class and the new attentions spare from weight decay."""
        names: set[str] = getattr(self.source, 'no_weight_decay', lambda _: set())(self)
        return names.union(
            f'{name}.{undecayed}'
            for name, module in self.named_modules()
            if isinstance(module, Replacement)
            for undecayed in module.no_weight_decay()
        )


@lru_cache(maxsize=256)
def linear_class(methods: Any, source: Any) -> Any:
    """The class of a linearized model: methods of ours before the source's."""
    of_source = dict(__module__=source.__module__, __qualname__=source.__qualname__)
    return type(source.__name__, (methods, source), {**of_source, 'source': source})


def _blank(methods: Any, source: Any) -> Any:
    cls = linear_class(methods, source)
    return cls.__new__(cls)
