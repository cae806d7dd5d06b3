"""Transformers of diffusers: attention processors that train instead of a softmax (t5 Sec. 5.2)."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, SD3Transformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from torch import Tensor, nn

from ..layers.inner_losses import INNER_LOSSES
from ..layers.inner_models import INNER_MODELS
from ..layers.key_norms import KEY_NORMS
from .linearize import linearize
from .replacement import LINEAR, MapSize, Replacement

MODELS = (DiTTransformer2DModel, SD3Transformer2DModel)


def attentions(model: nn.Module) -> dict[str, nn.Module | str]:
    """All self-attentions of the blocks by name; a reason in the place of one that is not taken."""
    return {
        f'transformer_blocks.{name}': _reason(module) or module
        for name, module in model.transformer_blocks.named_modules()
        if isinstance(module, Attention)
    }


def _reason(attention: Attention) -> str | None:
    if isinstance(attention.processor, Replacement):
        return LINEAR
    if type(attention.processor) not in (AttnProcessor2_0, JointAttnProcessor2_0):
        return (
            f'its processor is {type(attention.processor).__name__}, not the softmax of diffusers'
        )
    if attention.is_cross_attention:
        return 'it is cross-attention'
    return None


def replacement(
    model: nn.Module, attention: Attention, map_size: MapSize, options: Mapping[str, Any]
) -> Replacement:
    """A processor for an attention of diffusers."""
    return TTTProcessor(attention, map_size, **options)


def install(
    model: nn.Module, built: Mapping[str, Replacement], map_size: MapSize, note: Mapping[str, Any]
) -> list[str]:
    """Sets the processors, and notes them in the config; returns names of the new parameters."""
    for name, new in built.items():
        model.get_submodule(name).set_processor(new)
    model.register_forward_pre_hook(map_size.see_latents, with_kwargs=True)
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(map_size.recall, with_kwargs=True)
    model.register_to_config(linearize=_named(note))
    model.__class__ = _LINEAR_CLASSES.get(type(model), type(model))
    return [
        f'{name}.processor.{own}' for name, new in built.items() for own in new.new_parameters()
    ]


def _named(value: Any) -> Any:
    """Options with the library's own classes and functions by their names, for JSON."""
    if isinstance(value, Mapping):
        return {key: _named(inner) for key, inner in value.items()}
    known = [(n, p) for table in (INNER_MODELS, INNER_LOSSES, KEY_NORMS) for n, p in table.items()]
    return next((name for name, part in known if part is value), value)


class _Linearized:
    """Builds a model as its config notes that it was linearized, before its weights are loaded."""

    def save_config(self, *args: Any, **kwargs: Any) -> None:
        """Writes the config, as `save_pretrained` does.

        Raises:
            ValueError: A class or function of the user's own is in it.
        """
        try:
            super().save_config(*args, **kwargs)  # type: ignore[misc]
        except TypeError as error:
            raise ValueError(
                f'{type(self).__name__} was linearized with a class or function of your own, which '
                f'its config cannot name ({error}): save its state_dict, and linearize a new model '
                'in the same way before it is loaded.'
            ) from error

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any):
        if not (isinstance(config, Mapping) and 'linearize' in config):
            raise ValueError(
                f'{cls.__name__} is for what was saved after linearize(), and the config does not '
                f'say how: load the source by {cls.__mro__[2].__name__}, then linearize it.'
            )
        plain = {key: value for key, value in config.items() if key != 'linearize'}
        source = super().from_config  # type: ignore[misc]
        model, unused = source(plain, return_unused_kwargs=True, **kwargs)
        linearize(model, **config['linearize'])
        return (model, unused) if return_unused_kwargs else model


class LinearDiTTransformer2DModel(_Linearized, DiTTransformer2DModel):
    """A DiT after `linearize`: `from_pretrained` loads the weights of its processors too."""


class LinearSD3Transformer2DModel(_Linearized, SD3Transformer2DModel):
    """An SD3 after `linearize`: `from_pretrained` loads the weights of its processors too."""


_LINEAR_CLASSES = {
    DiTTransformer2DModel: LinearDiTTransformer2DModel,
    SD3Transformer2DModel: LinearSD3Transformer2DModel,
}


class TTTProcessor(Replacement):
    """Processor of an attention of diffusers: TTT in the place of the softmax.

    Projections and norms of queries and keys are the attention's own. In joint attention the text
    takes part in the inner training as tokens in front of the map; diffusers has it behind.

    Args:
        attention: The attention that it is for.
        map_size: The size of the map, shared by the model.
        options: See `Replacement`.
    """

    def __init__(self, attention: Attention, map_size: MapSize, **options: Any) -> None:
        weight = attention.to_k.weight
        with torch.device(weight.device):
            super().__init__(attention.to_k.out_features, attention.heads, map_size, **options)
        self.to(weight.dtype)
        self.train(attention.training)

    def forward(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mixes tokens of an image, and of a text beside it, as the softmax processors do.

        Args:
            attn: The attention, whose layers are used.
            hidden_states: `(B, h·w, C)` tokens of the map.
            encoder_hidden_states: `(B, T, C)` tokens of the text, or None.
            attention_mask: Refused.
            kwargs: What diffusers hands to all processors and none here reads.

        Returns:
            Tokens of the map `(B, h·w, C)`; with a text, also its `(B, T, C)`.

        Raises:
            ValueError: If there is a mask, or the tokens are not those of the map.
        """
        if attention_mask is not None:
            raise ValueError(
                'A linearized attention sees all tokens and takes no mask: leave attention_mask '
                'out.'
            )
        hw = self.map_size.of(hidden_states, 0)
        x, text = hidden_states, encoder_hidden_states
        q, k = self._norm(attn.norm_q, attn.to_q(x)), self._norm(attn.norm_k, attn.to_k(x))
        v = attn.to_v(x)
        if text is None:
            y = self.mix(x, q, k, v, hw).to(q.dtype)
            return attn.to_out[1](attn.to_out[0](y)) / attn.rescale_output_factor
        prefix = text.shape[1]
        q = torch.cat([self._norm(attn.norm_added_q, attn.add_q_proj(text)), q], 1)
        k = torch.cat([self._norm(attn.norm_added_k, attn.add_k_proj(text)), k], 1)
        v = torch.cat([attn.add_v_proj(text), v], 1)
        y = self.mix(torch.cat([text, x], 1), q, k, v, hw, prefix).to(q.dtype)
        text, image = y[:, :prefix], y[:, prefix:]
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](image)), text

    def _norm(self, norm: nn.Module | None, y: Tensor) -> Tensor:
        return y if norm is None else norm(y.unflatten(-1, self.heads)).flatten(2)
