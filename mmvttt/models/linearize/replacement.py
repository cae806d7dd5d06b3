"""The module that replaces attention, and the size of the map that it is told in each call."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.ttt_mixer import InnerTraining

# Why an attention that was replaced is not replaced again.
LINEAR = 'it is linearized already'
# Why 'all' leaves an attention out.
CROSS = 'it is cross-attention'


class MapSize(NamedTuple):
    """Height and width of the map of tokens in one call of a model.

    Attention sees `(B, N, C)` alone, and N = h·w does not tell h from w. The size is an argument of
    the blocks, by which recomputation in the backward pass, other threads and other images get
    their own.
    """

    h: int
    w: int

    @classmethod
    def of(cls, image: Tensor) -> 'MapSize':
        """The sides of an image or a map `(…, H, W)`."""
        h, w = image.shape[-2:]
        # torch.jit.trace, by which counters of FLOPs look at a model, has tensors for sizes.
        return cls(int(h), int(w)) if torch.jit.is_tracing() else cls(h, w)


class Replacement(InnerTraining):
    """The inner training that replaces a softmax attention.

    Args:
        embed_dims: Channels C of q, k and v.
        num_heads: Heads.
        options: See `InnerTraining`.
    """

    def __init__(self, embed_dims: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dims, num_heads, **options)
        # As timm's attentions have them: other code reads `block.attn.num_heads`.
        self.num_heads, self.head_dim = self.heads
        self._new = [name for name, _ in self.named_parameters()]

    def new_parameters(self) -> list[str]:
        """Names of the parameters that begin at random; what a subclass takes over has others."""
        return list(self._new)


def quantised(attention: nn.Module) -> str | None:
    """Reason for which an attention cannot be replaced, if a layer of it is quantised."""
    for name, module in attention.named_modules():
        weight = getattr(module, 'weight', None)
        if weight is not None and not (isinstance(weight, Tensor) and weight.is_floating_point()):
            return f'its {name} is quantised: linearize the model before it is quantised'
    return None


def checked_size(map_size: MapSize | None, tokens: Tensor, others: int) -> MapSize:
    """The size of the map of `(B, others + h·w, C)` tokens.

    Raises:
        ValueError: If it is not known, or there are more or fewer tokens.
    """
    if map_size is None:
        raise ValueError(
            'A linearized attention does not know the size of its map: call the model on an image, '
            '`model(…)`, not its `forward`, and not a block on tokens. A `forward` of your own '
            'takes the tokens from `self.forward_features`.'
        )
    h, w = map_size
    if tokens.shape[1] != others + h * w:
        raise ValueError(
            f'{tokens.shape[1]} tokens are not a map of {h}×{w} and {others} others: a linearized '
            'attention needs all patches of an image.'
        )
    return map_size
