"""Transformers of diffusers: attention processors that train instead of a softmax (t5 Sec. 5.2)."""

import importlib
from collections.abc import Collection, Mapping
from functools import partial, wraps
from typing import Any

import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import Tensor, nn

from mmvttt.errors import OptionError, UsageError

from ..layers.conv import map_size
from .replacement import (
    CROSS,
    LINEAR,
    MapSize,
    Note,
    Part,
    Replacement,
    checked_size,
    drop_map_size,
)

# Model → the argument of its call that its blocks pass to their processors, and its position.
_TO_PROCESSORS = {
    DiTTransformer2DModel: ('cross_attention_kwargs', 3),
    PixArtTransformer2DModel: ('cross_attention_kwargs', 4),
    SD3Transformer2DModel: ('joint_attention_kwargs', 5),
    FluxTransformer2DModel: ('joint_attention_kwargs', 7),
}
MODELS = tuple(_TO_PROCESSORS)
_STACKS = ('transformer_blocks', 'single_transformer_blocks')
_SOFTMAX = (AttnProcessor2_0, JointAttnProcessor2_0, FluxAttnProcessor)
# The module has classes of the same names, which load saved models.
_SAVED = f'{__package__}.saved'


def attentions(model: nn.Module) -> dict[str, Part]:
    """All attentions of the blocks by name."""
    return {
        f'{stack}.{name}': _reason(module) or partial(TTTProcessor, module)
        for stack in _STACKS
        for name, module in getattr(model, stack, nn.ModuleList()).named_modules()
        if isinstance(module, Attention | FluxAttention)
    }


def _reason(attention: nn.Module) -> str | None:
    if isinstance(attention.processor, Replacement):
        return LINEAR
    if getattr(attention, 'is_cross_attention', False):
        return CROSS
    if type(attention.processor) not in _SOFTMAX:
        return (
            f'its processor is {type(attention.processor).__name__}, not the softmax of diffusers'
        )
    return None


def install(
    model: Any, built: Mapping[str, Replacement], left: Collection[str], note: Note
) -> None:
    """Sets the processors, and records them in the config."""
    written = note.to_json()
    for name, new in built.items():
        model.get_submodule(name).set_processor(new)
    for name in left:
        model.get_submodule(name).register_forward_pre_hook(drop_map_size, with_kwargs=True)
    # A class of diffusers lists both as ignored, for example before an EMAModel of it fails.
    model.register_to_config(linearize=written, load_with=f'{_SAVED}.{type(model).__name__}')
    # By the class in model_index.json a pipeline loads the model. A class of the user stays.
    if type(model) in MODELS:
        model.__class__ = getattr(importlib.import_module(_SAVED), type(model).__name__)
    model.register_forward_pre_hook(_tell_map_size, with_kwargs=True)
    model.register_state_dict_pre_hook(_check_processors)


def _tell_map_size(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a model: adds the size of the map to the arguments of processors."""
    _check_processors(model)
    name, index = next(_TO_PROCESSORS[cls] for cls in type(model).__mro__ if cls in _TO_PROCESSORS)
    told = (args[index] if len(args) > index else kwargs.get(name)) or {}
    x = args[0] if args else kwargs['hidden_states']
    if isinstance(model, FluxTransformer2DModel):
        # These are tokens: their rows and columns have the sides, unless the caller passes them.
        size = told.get('map_size')
        if size is None:
            size = _one_map(args[4] if len(args) > 4 else kwargs['img_ids'])
        size = checked_size(MapSize(*size), x, 0)
    else:
        h, w = map_size(x)
        size = MapSize(h // model.config.patch_size, w // model.config.patch_size)
    told = {**told, 'map_size': size}
    if len(args) > index:
        return (*args[:index], told, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: told}


def _one_map(ids: Tensor) -> list[int]:
    """Height and width of the map whose rows and columns are `ids`, `(…, h·w, 3)`."""
    # In some versions of diffusers all images of a batch have ids.
    picture, row, column = ids.reshape(-1, *ids.shape[-2:])[0].int().unbind(-1)
    h, w = int(row.max()) + 1, int(column.max()) + 1
    order = torch.arange(len(row), device=row.device)
    if picture.any() or h * w != len(row) or not torch.equal(row * w + column, order):
        raise OptionError(
            f'img_ids of {len(row)} tokens are not the rows and columns of one map: a linearized '
            'Flux takes one picture, row by row; leave out further ones (Kontext, Fill by '
            'pictures), or pass joint_attention_kwargs=dict(map_size=(h, w)).'
        )
    return [h, w]


def _check_processors(model: nn.Module, *_: object) -> None:
    """Refuses to run or save a model that diffusers has put other processors into.

    `set_attn_processor`, `fuse_qkv_projections`, `load_ip_adapter` and others do that.
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

    Projections, norms of queries and keys and rotary positions are the attention's own. In joint
    attention the text takes part in the inner training as tokens in front of the map, where Flux
    has it. SD3 has it behind the map.

    Args:
        attention: The attention that it is for.
        options: See `Replacement`.
    """

    def __init__(self, attention: Any, **options: Any) -> None:
        super().__init__(attention.to_k.out_features, attention.heads, attention, **options)

    def forward(
        self,
        attn: Attention | FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        map_size: MapSize | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mixes tokens of an image, and of a text with it, as the softmax processors do.

        Args:
            attn: The attention, whose layers are used.
            hidden_states: `(B, h·w, C)` tokens of the map, in Flux's single blocks with the text in
                front, `(B, T + h·w, C)`.
            encoder_hidden_states: `(B, T, C)` tokens of the text, or None.
            attention_mask: Must be None.
            image_rotary_emb: Cosines and sines `(T + h·w, d)`, or None.
            map_size: Size of the map.

        Returns:
            Tokens of the map `(B, h·w, C)`, and with a text also its `(B, T, C)`. Flux's single
            blocks get both in one tensor, before the output projection.
        """
        if attention_mask is not None:
            raise OptionError(
                'A linearized attention sees all tokens and takes no mask: leave attention_mask '
                'out.'
            )
        x, text = hidden_states, encoder_hidden_states
        single = getattr(attn, 'pre_only', False)
        prefix = x.shape[1] - map_size.h * map_size.w if single and map_size else 0
        hw = checked_size(map_size, x, prefix)
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q, k = self._norm(attn.norm_q, q), self._norm(attn.norm_k, k)
        if text is not None:
            prefix = text.shape[1]
            q = torch.cat([self._norm(attn.norm_added_q, attn.add_q_proj(text)), q], 1)
            k = torch.cat([self._norm(attn.norm_added_k, attn.add_k_proj(text)), k], 1)
            v = torch.cat([attn.add_v_proj(text), v], 1)
            x = torch.cat([text, x], 1)
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(y, image_rotary_emb, sequence_dim=1) for y in (q, k))
        y = self.mix(x, q.flatten(2), k.flatten(2), v, hw, prefix).to(q.dtype)
        if single:
            return y
        image = attn.to_out[1](attn.to_out[0](y[:, prefix:]))
        if text is None:
            return image / getattr(attn, 'rescale_output_factor', 1)
        text = y[:, :prefix]
        return image, text if attn.context_pre_only else attn.to_add_out(text)

    # diffusers passes the arguments that this signature names.
    @wraps(forward)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().__call__(*args, **kwargs)

    def _norm(self, norm: nn.Module | None, y: Tensor) -> Tensor:
        """Queries or keys by heads, `(B, N, H, d)`, normed."""
        y = y.unflatten(-1, self.heads)
        return y if norm is None else norm(y)
