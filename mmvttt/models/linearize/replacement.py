"""The module that replaces attention, and how it learns the size of the map of tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.ttt_mixer import InnerTraining

# Why an attention that was replaced is not replaced again.
LINEAR = 'it is linearized already'


class MapSize:
    """Height and width of the map that the tokens of a model belong to.

    Attention sees `(B, N, C)` alone, and N = h·w does not tell h from w. One object is shared by
    all attentions of a model; bound methods of it are the model's hooks, so that a deep copy of
    the model (an EMA) has an object of its own.

    Activation checkpointing runs a block again in the backward pass, when the model may have seen
    another image: the input of a block remembers its size.
    """

    def __init__(self) -> None:
        self.hw: tuple[int, int] | None = None

    def set(self, tokens: Tensor, hw: tuple[int, int]) -> None:
        """Notes the `(h, w)` of the tokens that a block is about to be run on."""
        self.hw = hw
        # A compiled graph has the size in it, for both passes.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            tokens._mmvttt_hw = hw

    def see_image(self, patch_embed: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of a patch embedding of timm."""
        self.hw = patch_embed.dynamic_feat_size(_sides(args[0]))

    def see_latents(
        self, transformer: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Forward pre-hook of a transformer of diffusers."""
        h, w = _sides(args[0] if args else kwargs['hidden_states'])
        patch = transformer.config.patch_size
        self.hw = h // patch, w // patch

    def recall(self, block: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook of a block, whose first argument is its tokens."""
        tokens = args[0] if args else kwargs['hidden_states']
        hw = getattr(tokens, '_mmvttt_hw', self.hw)
        if hw is not None:
            self.set(tokens, hw)

    def of(self, tokens: Tensor, others: int) -> tuple[int, int]:
        """The `(h, w)` of `(B, others + h·w, C)` tokens.

        Raises:
            ValueError: If there are more or fewer tokens, or the size is not known.
        """
        if self.hw is None:
            raise ValueError(
                'A linearized attention does not know the size of its map: run the whole model on '
                'an image once, not a block of it.'
            )
        h, w = self.hw
        if tokens.shape[1] != others + h * w:
            raise ValueError(
                f'{tokens.shape[1]} tokens are not a map of {h}×{w} and {others} others: a '
                'linearized attention needs all patches of an image.'
            )
        return h, w


class Replacement(InnerTraining):
    """The inner training that replaces a softmax attention.

    Args:
        embed_dims: Channels C of q, k and v.
        num_heads: Heads.
        map_size: The size of the map, shared by the model.
        options: See `InnerTraining`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        map_size: MapSize,
        **options: Any,
    ) -> None:
        super().__init__(embed_dims, num_heads, **options)
        self.map_size = map_size
        self._new = [name for name, _ in self.named_parameters()]

    def new_parameters(self) -> list[str]:
        """Names of the parameters that begin at random; what a subclass takes over has others."""
        return list(self._new)


def _sides(image: Tensor) -> tuple[int, int]:
    h, w = image.shape[-2:]
    # torch.jit.trace, by which counters of FLOPs look at a model, has tensors for sizes.
    return (int(h), int(w)) if torch.jit.is_tracing() else (h, w)
