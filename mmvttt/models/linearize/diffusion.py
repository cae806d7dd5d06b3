"""Transformers of diffusers: attention processors that train instead of a softmax (t5 Sec. 5.2)."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, SD3Transformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from torch import Tensor, nn

from mmvttt.errors import UsageError

from .replacement import LINEAR, MapSize, Replacement, checked_size, json_note

# Model → the argument of its call that its blocks hand on to their processors, and its place.
_TO_PROCESSORS = {
    DiTTransformer2DModel: ('cross_attention_kwargs', 3),
    SD3Transformer2DModel: ('joint_attention_kwargs', 5),
}
MODELS = tuple(_TO_PROCESSORS)
# Has classes of the same names that load what was saved.
_SAVED = f'{__package__}.saved'


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


def replacement(model: nn.Module, attention: Attention, options: Mapping[str, Any]) -> Replacement:
    """A processor for an attention of diffusers."""
    return TTTProcessor(attention, **options)


def install(
    model: nn.Module,
    built: Mapping[str, Replacement],
    left: Mapping[str, nn.Module | str],
    note: Mapping[str, Any],
) -> list[str]:
    """Sets the processors, and notes them in the config; returns names of the new parameters.

    Raises:
        ValueError: If an option cannot be written into a config. The model is unchanged.
    """
    note = json_note(note)
    for name, new in built.items():
        model.get_submodule(name).set_processor(new)
    for name in left:
        model.get_submodule(name).register_forward_pre_hook(_drop_map_size, with_kwargs=True)
    model.register_to_config(linearize=note)
    # A pipeline writes it into model_index.json, and looks the class up in it if it is imported.
    model.__module__ = importlib.import_module(_SAVED).__name__
    model.register_forward_pre_hook(_tell_map_size, with_kwargs=True)
    model.register_state_dict_pre_hook(_check_processors)
    return [
        f'{name}.processor.{own}' for name, new in built.items() for own in new.new_parameters()
    ]


def _tell_map_size(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a model: adds the size of the map to what processors are told."""
    _check_processors(model)
    h, w = MapSize.of(args[0] if args else kwargs['hidden_states'])
    size = MapSize(h // model.config.patch_size, w // model.config.patch_size)
    name, place = next(_TO_PROCESSORS[cls] for cls in type(model).__mro__ if cls in _TO_PROCESSORS)
    if len(args) > place:
        told = {**(args[place] or {}), 'map_size': size}
        return (*args[:place], told, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: {**(kwargs.get(name) or {}), 'map_size': size}}


def _drop_map_size(
    attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention that stays softmax, whose processor is not told."""
    return args, {name: value for name, value in kwargs.items() if name != 'map_size'}


def _check_processors(model: nn.Module, *_: object) -> None:
    """Refuses to run or save a model that diffusers has put other processors into.

    `set_attn_processor`, `fuse_qkv_projections`, `load_ip_adapter` and others do that.

    Raises:
        UsageError: If an attention that the config calls linearized is not.
    """
    config: Any = model.config
    for name in config.linearize['where']:
        processor = model.get_submodule(name).processor
        if not isinstance(processor, TTTProcessor):
            raise UsageError(
                f'{name} was linearized, and has a {type(processor).__name__} now: a method of '
                'diffusers that sets or fuses attention processors has removed the TTT layer and '
                'its weights. Do without that method, undo it (unfuse_qkv_projections), or load '
                'the weights again; for softmax attention, load the source.'
            )


class TTTProcessor(Replacement):
    """Processor of an attention of diffusers: TTT in the place of the softmax.

    Projections and norms of queries and keys are the attention's own. In joint attention the text
    takes part in the inner training as tokens in front of the map; diffusers has it behind.

    Args:
        attention: The attention that it is for.
        options: See `Replacement`.
    """

    def __init__(self, attention: Attention, **options: Any) -> None:
        weight = attention.to_k.weight
        with torch.device(weight.device):
            super().__init__(attention.to_k.out_features, attention.heads, **options)
        self.to(weight.dtype)
        self.train(attention.training)

    def __call__(
        self, attn: Attention, hidden_states: Tensor, map_size: MapSize | None = None, **kwargs: Any
    ) -> Any:
        """See `forward`; diffusers hands over what this signature names."""
        return super().__call__(attn, hidden_states, map_size=map_size, **kwargs)

    def forward(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        map_size: MapSize | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mixes tokens of an image, and of a text beside it, as the softmax processors do.

        Args:
            attn: The attention, whose layers are used.
            hidden_states: `(B, h·w, C)` tokens of the map.
            encoder_hidden_states: `(B, T, C)` tokens of the text, or None.
            attention_mask: Refused.
            map_size: Size of the map.

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
        hw = checked_size(map_size, hidden_states, 0)
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
