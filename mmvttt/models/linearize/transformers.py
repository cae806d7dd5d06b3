"""Vision models of transformers: TTT behind the interface that their attentions call (t5 Sec. 4).

Since version 5 an attention calls the function that its config names. A linearized one names
`NAME`, and has a `TTT` module.
"""

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import copy_

from mmvttt.errors import OptionError, UsageError

from ..layers.conv import map_size
from ..layers.inner_options import DYNAMIC
from ..layers.json_options import from_json
from .account import replace
from .encoders import Encoder, Layout, ancestors, beyond_ttt, calling, encoders, layouts, patch_grid
from .replacement import (
    LINEAR,
    Linearized,
    MapSize,
    Note,
    Part,
    Replacement,
    checked_size,
    linear_class,
)

__all__ = ['TTT', 'from_pretrained']

MODELS = (PreTrainedModel,)
# Name of the attention function, in a config.json also for people who load it without mmvttt.
NAME = __name__
# Name of the module inside an attention, and so a part of the names of its weights. Where a class
# of transformers loads a softmax model all the same, its report lists these names as unexpected.
LAYER = 'linearized_by_mmvttt'


class _Calls(threading.local):
    """Sizes of the maps of a thread's calls in progress, the innermost last."""

    def __init__(self) -> None:
        self.sizes: list[MapSize | None] = []


_CALLS = _Calls()


class TTT(Replacement):
    """The inner training of one attention, between the attention's projections.

    Args:
        attention: The attention.
        layout: Where its tokens have the map.
        options: See `Replacement`.
    """

    def __init__(self, attention: nn.Module, layout: Layout, **options: Any) -> None:
        heads, dims = (
            next(getattr(attention, name) for name in names if hasattr(attention, name))
            for names in (('num_heads', 'num_attention_heads'), ('head_dim', 'attention_head_size'))
        )
        super().__init__(heads * dims, heads, attention, **options)
        if self.options.step == DYNAMIC:
            raise OptionError(
                f'step={DYNAMIC!r} reads the input of an attention, and attentions of transformers '
                'pass only queries, keys and values: give a number.'
            )
        self.layout = layout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries `(B, H, N, d)`, keys and values of as many or fewer heads → `(B, N, H, d)`."""
        groups = q.shape[1] // k.shape[1]
        k, v = (y.repeat_interleave(groups, 1) if groups > 1 else y for y in (k, v))
        prefix, suffix = self.layout
        # Tokens behind the map move in front of it.
        q, k, v = (_rolled(y.transpose(1, 2).flatten(2), suffix) for y in (q, k, v))
        size = _current()
        if size is None:
            raise OptionError(
                'A linearized attention does not know the size of its map: call its image encoder '
                'on images, not a layer on tokens. To recompute layers in the backward pass, '
                'linearize the whole model, not a part of it, and call its '
                'activation_checkpointing_enable().'
            )
        checked_size(size, q, prefix + suffix)
        y = self.mix(q, q, k, v, size, prefix + suffix)
        return _rolled(y, -suffix).unflatten(-1, self.heads)


def _rolled(tokens: Tensor, count: int) -> Tensor:
    return tokens.roll(count, 1) if count else tokens


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of linearized attentions.

    Args:
        module: The attention.
        query: `(B, H, N, d)`.
        key, value: `(B, H / groups, N, d)`.
        attention_mask: None, or a mask that masks nothing.
        dropout: Must be 0.
        kwargs: Other arguments of attention functions, without those that change scores.
    """
    layer = module._modules.get(LAYER)
    if layer is None:
        raise UsageError(
            f'{type(module).__name__} comes from the folder of a linearized model, without the '
            f'weights of its TTT layer: load the folder by {NAME}.from_pretrained(CLASS, FOLDER).'
        )
    argument = beyond_ttt(not _is_full(attention_mask), dropout, kwargs)
    if argument:
        raise OptionError(
            f'{type(module).__name__} is linearized: it sees all tokens and has no scores, and was '
            f'given {argument}. Leave it out; a mask may be all ones.'
        )
    return layer(query, key, value), None


def _is_full(mask: Tensor | None) -> bool:
    # An export writes masks of ones where there is none. `_enter` has refused a mask.
    if mask is None or torch.compiler.is_exporting():
        return True
    return bool(mask.all() if mask.dtype == torch.bool else not mask.any())


AttentionInterface.register(NAME, attend)


def attentions(model: nn.Module) -> dict[str, Part]:
    """All attentions by name."""
    homes = encoders(model)
    linear = [name for name in homes if LAYER in model.get_submodule(name)._modules]
    if linear:
        return dict.fromkeys(linear, LINEAR)
    maps: dict[Encoder, Mapping[str, Layout | str]] = {}
    parts: dict[str, Part] = {}
    for name, home in homes.items():
        if isinstance(home, str):
            parts[name] = home
            continue
        if home not in maps:
            encoder = model.get_submodule(home.name)
            maps[home] = _noted(encoder) or layouts(encoder, home.patches)
        layout = maps[home].get(home.inside(name), 'not chosen')
        attention = model.get_submodule(name)
        parts[name] = layout if isinstance(layout, str) else partial(TTT, attention, layout)
    return parts


def _noted(encoder: Any) -> dict[str, Layout]:
    """The layouts that the config of a linearized encoder has for its attentions, by name."""
    note = getattr(encoder.config, 'linearize', {})
    return {name: Layout(*map(int, tokens)) for name, tokens in note.get('tokens', {}).items()}


def install(model: nn.Module, built: Mapping[str, TTT], left: Collection[str], note: Note) -> None:
    """Adds the layers to their attentions, and writes into the configs how to build them again."""
    homes: Any = encoders(model)
    for name, layer in built.items():
        attention: Any = model.get_submodule(name)
        attention.add_module(LAYER, layer)
        attention.config = calling(attention.config, NAME)
    for home in {homes[name] for name in built}:
        encoder: Any = model.get_submodule(home.name)
        tokens = {home.inside(n): [*layer.layout] for n, layer in built.items() if homes[n] == home}
        encoder.config.linearize = {'tokens': tokens, **note.options.to_json()}
        encoder.register_forward_pre_hook(partial(_enter, home.patches), with_kwargs=True)
        encoder.register_forward_hook(_leave, always_call=True)
    for ancestor in {a for name in built for a in ancestors(name)}:
        module = model.get_submodule(ancestor)
        if isinstance(module, PreTrainedModel):
            # In config.json: classes of transformers refuse the file then, or call `attend`.
            module.config.attn_implementation = NAME
            if not isinstance(module, _Linear):
                kind: Any = type(module)
                module.__class__ = linear_class(_Linear, kind)


def _enter(patches: str, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an encoder: its attentions are called on a map of this size."""
    _CALLS.sizes.append(None)
    images: Any = kwargs.get('pixel_values', args[0] if args else None)
    if kwargs.get('output_attentions') or encoder.config.output_attentions:
        raise OptionError('A linearized attention has no weights: leave output_attentions out.')
    masks = [n for n, v in kwargs.items() if n.endswith('attention_mask') and v is not None]
    if torch.compiler.is_exporting() and masks:
        raise OptionError(f'A linearized attention sees all tokens: export without {masks[0]}.')
    # Without images, the model says what is missing.
    if images is not None:
        _CALLS.sizes[-1] = patch_grid(encoder.get_submodule(patches), map_size(images))


def _leave(*_: Any) -> None:
    """Forward hook of an encoder, after errors too, those of `_enter` among them."""
    _CALLS.sizes.pop()


def _current() -> MapSize | None:
    return _CALLS.sizes[-1] if _CALLS.sizes else None


def _checkpoint(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Checkpoints a function, and recomputes it on a map of the same size."""
    return checkpoint(partial(_on_map, _current(), function), *args)


def _on_map(size: Any, function: Callable[..., Any], *args: Any) -> Any:
    if _current() == size:
        # The first run. torch.compile takes no changed list inside of a checkpoint.
        return function(*args)
    _CALLS.sizes.append(size)
    try:
        return function(*args)
    finally:
        _leave()


class _Linear(Linearized, PreTrainedModel):
    """Methods of a linearized model, and of the models inside of it around its attentions."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        for part in _configs(config):
            if part._attn_implementation == NAME:
                part._attn_implementation_internal = None
        super().__init__(config, *args, **kwargs)
        _restore(self)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the map."""
        return next(m.layout.prefix for m in self.modules() if isinstance(m, TTT))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The saved model; with `attn_implementation`, see `set_attn_implementation`."""
        if kwargs.get('attn_implementation') is not None:
            _warn_of_others(cls)
        return super().from_pretrained(*args, **kwargs)

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Sets the function of the attentions that are not linearized, with a warning."""
        super().set_attn_implementation(*args, **kwargs)
        _warn_of_others(type(self))

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        **kwargs: Any,
    ) -> None:
        function = partial(_checkpoint, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, function, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Layers that a checkpoint does not have, such as the source's.
        if isinstance(module, TTT):
            heads, dims = module.heads
            new = Replacement(heads * dims, heads, module, **vars(module.options)).state_dict()
            for name, parameter in module.named_parameters():
                copy_(parameter, new[name])


def _warn_of_others(kind: type[Any]) -> None:
    warnings.warn(
        f'{kind.__name__} is linearized: attn_implementation changes only its other attentions. '
        'For softmax attention load the source.',
        stacklevel=3,
    )


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name))


def _restore(model: nn.Module) -> None:
    """Linearizes a model as its configs say."""
    parts = attentions(model)
    for home in {home for home in encoders(model).values() if isinstance(home, Encoder)}:
        encoder: Any = model.get_submodule(home.name)
        names = [f'{home.name}.{name}'.lstrip('.') for name in _noted(encoder)]
        if names:
            options = {k: v for k, v in encoder.config.linearize.items() if k != 'tokens'}
            replace(model, names, parts, install, from_json(options))
    if not any(isinstance(module, TTT) for module in model.modules()):
        raise OptionError(
            f'The config of this {type(model).__name__} does not say how it was linearized: load '
            'the source by its class in transformers, then call mmvttt.linearize.'
        )


def from_pretrained(source: Any, folder: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Loads a linearized model that `save_pretrained` or `push_to_hub` has written.

    Args:
        source: A class of transformers, such as `AutoModelForDepthEstimation` or `Dinov2Model`.
        folder: A folder, or a name on the hub.
        options: Options of transformers' own `from_pretrained`.
    """
    mapping = getattr(source, '_model_mapping', None)
    if mapping is not None:
        config, _ = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
        if type(config) not in mapping:
            raise OptionError(
                f'{os.fspath(folder)} holds a model of {type(config).__name__}, for which '
                f'{source.__name__} has no class: give the class that wrote the folder.'
            )
        source = mapping[type(config)]
    return linear_class(_Linear, source).from_pretrained(folder, **options)
