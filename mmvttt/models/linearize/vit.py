"""The attentions of timm's vision transformers that can be replaced, and their replacements."""

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models import beit, eva, vision_transformer
from timm.models._input import update_model_args
from timm.models.beit import Beit
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import Tensor, nn

from mmvttt.errors import OptionError

from ..layers.conv import map_size
from .replacement import (
    LINEAR,
    Linearized,
    MapSize,
    Note,
    Part,
    Replacement,
    checked_size,
    drop_map_size,
    linear_class,
)

# timm's function by the model's class that converts the names and shapes of published weights.
_FROM_AUTHORS: Mapping[type[nn.Module], Callable[..., dict[str, Tensor]]] = {
    VisionTransformer: vision_transformer.checkpoint_filter_fn,
    Eva: eva.checkpoint_filter_fn,
    Beit: beit.checkpoint_filter_fn,
    VisionTransformerRelPos: lambda weights, model: weights,
}
MODELS = (VisionTransformer, Eva, Beit, VisionTransformerRelPos)
# Attribute of a linearized model: its `Note`.
NOTE = 'linearize_options'
# The name in timm's registry by which a linearized model is built again.
LINEAR_VIT = 'linear_vit'
_ATTENTIONS = (Attention, AttentionRope, EvaAttention, beit.Attention, RelPosAttention)
# Position biases of pairs of tokens, which go: in an attention, and in a model for all blocks.
_BIASES = ('relative_position_bias_table', 'relative_position_index', 'rel_pos')
_SHARED = ('rel_pos_bias', 'shared_rel_pos')
# Methods that timm's models run on an image.
_METHODS = ('forward_features', 'forward_intermediates')
_NO_MASK = (
    'A linearized attention sees all tokens and takes no mask: leave attn_mask and is_causal out.'
)


def from_authors(model: nn.Module) -> Callable[..., dict[str, Tensor]]:
    """timm's own function that brings published weights to a model's names and shapes."""
    return next(rename for kind, rename in _FROM_AUTHORS.items() if isinstance(model, kind))


def attentions(model: Any) -> dict[str, Part]:
    """All self-attentions of the blocks by name."""
    parts: dict[str, Part] = {}
    argument = _argument(model)
    for i, block in enumerate(model.blocks):
        taken = inspect.signature(block.forward).parameters.values()
        if not any(p.name == argument or p.kind == p.VAR_KEYWORD for p in taken):
            raise OptionError(
                f'blocks.{i} is a {type(block).__name__} whose forward does not take {argument}, '
                'by which a linearized model passes the size of the map: give its forward '
                '**kwargs, and pass them to the block inside.'
            )
        inside = {
            f'blocks.{i}.{name}': _reason(module)
            or partial(TTTAttention, module, model.num_prefix_tokens)
            for name, module in block.named_modules()
            if isinstance(module, (*_ATTENTIONS, Replacement))
        }
        kind = type(block).__name__
        parts |= inside or {f'blocks.{i}': f'{kind} has no attention that is known here'}
    return parts


def _argument(model: nn.Module) -> str:
    """The argument by which timm's model passes something of its own to its blocks."""
    if isinstance(model, Beit):
        return 'shared_rel_pos_bias'
    return 'shared_rel_pos' if isinstance(model, VisionTransformerRelPos) else 'attn_mask'


def _reason(attention: Any) -> str | None:
    """The reason why an attention cannot be replaced, or None."""
    if isinstance(attention, Replacement):
        return LINEAR
    # A subclass may compute something else.
    if type(attention) not in _ATTENTIONS:
        return f'{type(attention).__name__} is not one of the attentions known here'
    if attention.attn_drop.p > 0:
        return 'it drops attention weights, which TTT does not have: build it with attn_drop_rate=0'
    heads, width = attention.num_heads, attention.proj.in_features
    if heads * getattr(attention, 'head_dim', width // heads) != width:
        return f'its {width} channels do not divide into {heads} heads'
    return None


def install(
    model: Any, built: Mapping[str, Replacement], left: Collection[str], note: Note
) -> None:
    """Puts the replacements into their places."""
    for method in _METHODS:
        if method in vars(model):
            raise OptionError(
                f'{type(model).__name__}.{method} was set on this model, and linearize sets it: '
                'linearize first, then wrap what the model has.'
            )
    for shared in _SHARED:
        if getattr(model, shared, None) is not None:
            if left:
                raise OptionError(
                    f'all blocks of {type(model).__name__} share one position bias ({shared}): '
                    "replace all attentions, where='all'."
                )
            setattr(model, shared, None)
    for name in left:
        model.get_submodule(name).register_forward_pre_hook(drop_map_size, with_kwargs=True)
    for name, new in built.items():
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, new)
    setattr(model, NOTE, note)
    cfg: Any = getattr(model, 'pretrained_cfg', None) or {}
    source = cfg.get('architecture')
    if source:
        # With these timm saves the model, and `linear_vit` builds it again.
        model.pretrained_cfg = model.default_cfg = {**cfg, 'architecture': LINEAR_VIT}
        options: Any = note.options
        with suppress(ValueError):
            # timm reports classes that no config can name when it saves the model.
            options = note.to_json()
        update_model_args(model, source=source, linearize=options)
    kind: Any = type(model)
    model.__class__ = linear_class(_OnImages, kind)


class _OnImages(Linearized):
    """Passes the size of an image's map to the blocks, where timm's pass a mask or a bias.

    Functions that are set on the instance would run the original's blocks in each copy, and a hook
    sees neither a call of `forward_features` nor, in the backward pass, the image of a recomputed
    block.
    """

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._call(x, kwargs).forward_features(x, *args, **kwargs)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._call(x, kwargs).forward_intermediates(x, *args, **kwargs)

    def _call(self, x: Tensor, kwargs: dict[str, Any]) -> Any:
        """This model as one of timm's, in one call, with blocks that pass the size of the map."""
        if kwargs.pop('attn_mask', None) is not None or kwargs.pop('is_causal', False):
            raise OptionError(_NO_MASK)
        size = MapSize(*self.patch_embed.dynamic_feat_size(map_size(x)))
        call = self.source.__new__(self.source)
        told = {_argument(self): size}
        vars(call).update(vars(self), blocks=_Blocks(partial(_told, b, told) for b in self.blocks))
        return call


class _Blocks(list):
    """Blocks as functions, one after the other."""

    def __call__(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def _told(block: nn.Module, told: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return block(*args, **{**kwargs, **told})


class TTTAttention(Replacement):
    """timm's attention whose softmax is replaced by a TTT layer (t5 Sec. 4).

    Projections, norms, gate and dropout are the source's own, under its names: the state dict is
    the source's and the new tensors. The order is the source's: projections, norms of queries and
    keys, rotary positions, the inner training in the place of the softmax, its norm, gate and
    projection. The prefix tokens (class, registers) take part in the inner training. Keys
    and values that a group of queries shares are repeated. Position biases of pairs of tokens are
    dropped, because there are no scores to add them to.

    Args:
        source: An attention of a model that `linearize` takes.
        prefix: Tokens in front of the map.
        options: See `Replacement`.
    """

    def __init__(self, source: Any, prefix: int, **options: Any) -> None:
        super().__init__(source.proj.in_features, source.num_heads, source, **options)
        self.prefix = prefix
        self.rotate_half = getattr(source, 'rotate_half', False)
        self.groups = getattr(source, 'num_kv_groups', 1)
        self.gate = self.rel_pos = None
        for name, part in [*source.named_children(), *source.named_parameters(recurse=False)]:
            if name not in _BIASES:
                setattr(self, name, part)
        for name, buffer in source.named_buffers(recurse=False):
            if name not in _BIASES:
                # k_bias, zeros that are in no state dict.
                self.register_buffer(name, buffer, persistent=False)
        for name in ('q_norm', 'k_norm', 'norm'):
            if not hasattr(source, name):
                setattr(self, name, nn.Identity())

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Does nothing, because the position biases that `Beit` resizes are gone."""

    def forward(self, x: Tensor, rope: Tensor | None = None, **told: Any) -> Tensor:
        """Normed tokens `(B, prefix + h·w, C)` → `(B, prefix + h·w, C)`.

        Args:
            x: The tokens.
            rope: `(…, h·w, 2d)`, sines and cosines of the rotary positions.
            told: The size of the map, as `hw` or in the argument that timm's blocks pass to their
                attention. Any other value, such as a mask or `is_causal`, is an error.
        """
        hw = None
        for value in told.values():
            if isinstance(value, MapSize):
                hw = value
            elif value is not None and value is not False:
                raise OptionError(_NO_MASK)
        hw = checked_size(hw, x, self.prefix)
        q, k, v = self._project(x)
        q, k = (self._place(norm, y, v, rope) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        if self.groups > 1:
            k, v = (
                y.unflatten(-1, (-1, self.heads[1])).repeat_interleave(self.groups, 2).flatten(2)
                for y in (k, v)
            )
        y = self.norm(self.mix(x, q, k, v, hw, self.prefix))
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if getattr(self, 'qkv', None) is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        qkv = self.qkv(x)
        if getattr(self, 'q_bias', None) is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias)).type_as(qkv)
        return qkv.chunk(3, -1)

    def _place(self, norm: nn.Module, y: Tensor, v: Tensor, rope: Tensor | None) -> Tensor:
        """Queries or keys `(B, N, C)`, normed by heads, the map's tokens rotated."""
        y = norm(y.unflatten(-1, (-1, self.heads[1])))
        if rope is not None:
            y = y.transpose(1, 2)
            rotated = apply_rot_embed_cat(y[:, :, self.prefix :], rope, half=self.rotate_half)
            y = torch.cat([y[:, :, : self.prefix], rotated], 2).type_as(v).transpose(1, 2)
        return y.flatten(2)
