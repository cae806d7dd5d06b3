"""Image encoders in models of transformers, and which of their tokens are the map of patches."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from mmvttt.errors import UsageError

from .replacement import CAUSAL, CROSS, NO_MAP, TUBES, MapSize

# Arguments by which attention functions of transformers change the scores or unpack images.
OF_SCORES = (
    'position_bias',
    'softcap',
    's_aux',
    'sliding_window',
    'cu_seq_lens_q',
    'cu_seq_lens_k',
    'cache',
)
_PROBE = f'{__name__}.probe'
_NO_CALL = 'it does not call the attention interface of transformers'
_DROPOUT = 'it drops attention weights, which TTT does not have: set its dropout to 0'
_WINDOWS = 'it works on windows of the map, or on images packed into one sequence'
_ORDER = (
    'its tokens are not the patches of an image, row by row: they are dropped, merged, mixed, or '
    'in another order (windows)'
)
_ADDED = 'a mask, or biases of the scores'
# Patches of the images that an encoder is tried on. The second map divides into windows.
_TRIED = ((4, 6), (8, 16))


class Encoder(NamedTuple):
    """A module that takes images, by its name in the model.

    Attributes:
        name: Its name.
        patches: The name, inside of it, of the convolution that embeds the patches.
    """

    name: str
    patches: str


class Layout(NamedTuple):
    """Numbers of tokens in front of the map and behind it, in the sequence of an attention."""

    prefix: int
    suffix: int


_RECORD: ContextVar[Callable[..., Tensor]] = ContextVar('record of a probe')


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _RECORD.get()(module, *args, **kwargs), None


AttentionInterface.register(_PROBE, _attend)


def encoders(model: nn.Module) -> dict[str, Encoder | str]:
    """The image encoder of each attention, by the attention's name, or why it is in none."""
    names = {
        name: next((a for a in ancestors(name) if _takes_images(model.get_submodule(a))), None)
        for name, module in model.named_modules()
        if _is_attention(module)
    }
    patches: dict[str, str] = {}
    for name, module in model.named_modules():
        # A convolution belongs to the innermost of the modules that take images.
        encoder = next((a for a in ancestors(name) if a in names.values()), None)
        if encoder is not None and _embeds_patches(module, model.get_submodule(encoder)):
            patches.setdefault(encoder, name.removeprefix(f'{encoder}.'))
    tubes = any(isinstance(module, nn.Conv3d) for module in model.modules())
    result: dict[str, Encoder | str] = {}
    for name, encoder in names.items():
        attention: Any = model.get_submodule(name)
        if attention.is_causal:
            result[name] = CAUSAL
        elif encoder in patches:
            result[name] = Encoder(encoder, patches[encoder])
        else:
            result[name] = TUBES if tubes else NO_MAP
    return result


def ancestors(name: str) -> Iterator[str]:
    """Names of the modules around a module, the nearest first, and '' at the end."""
    while name:
        name = name.rpartition('.')[0]
        yield name


def _is_attention(module: Any) -> bool:
    # transformers' attentions say so of themselves, and read their config in each call.
    marked = hasattr(module, 'is_causal') and hasattr(module, 'config')
    return marked and not isinstance(module, PreTrainedModel)


def _takes_images(module: nn.Module) -> bool:
    return 'pixel_values' in inspect.signature(module.forward).parameters


def _embeds_patches(module: nn.Module, encoder: Any) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.in_channels == getattr(encoder.config, 'num_channels', 3)
        and module.kernel_size == module.stride != (1, 1)
    )


def _sides(patches: Any, image: Sequence[int]) -> list[tuple[int, int, int]]:
    """Height and width of an image, each with the padding and the side of a patch."""
    padding = (0, 0) if isinstance(patches.padding, str) else patches.padding
    return [*zip(image, padding, patches.stride, strict=True)]


def patch_grid(patches: nn.Module, image: Sequence[int]) -> MapSize:
    """The size of the map that a convolution makes of an image of this height and width."""
    return MapSize(*((side + 2 * pad) // step for side, pad, step in _sides(patches, image)))


def run(encoder: Any, images: Tensor, **options: Any) -> Any:
    """The output of an encoder on images `(B, C, H, W)`, of any size if it has the option."""
    parameters = inspect.signature(encoder.forward).parameters
    if 'interpolate_pos_encoding' in parameters and images.shape[2:] != _trained(encoder):
        options['interpolate_pos_encoding'] = True
    return encoder(pixel_values=images, **options)


def _trained(encoder: Any) -> tuple[int, ...]:
    """Height and width of the images that an encoder has positions for, or ()."""
    side = getattr(encoder.config, 'image_size', None) or ()
    return (side, side) if isinstance(side, int) else tuple(side)


def layouts(encoder: Any, patches: Any) -> dict[nn.Module, Layout | str]:
    """Where each attention has the map, or why it cannot be replaced.

    The encoder runs once, on small images if it can, with attentions that return their values.
    """
    if patches.weight.is_meta:
        raise UsageError(f'{type(encoder).__name__} has no weights yet: load them, then linearize.')
    attentions = [module for module in encoder.modules() if _is_attention(module)]
    images = [(h * patches.stride[0], w * patches.stride[1]) for h, w in _TRIED]
    reasons = []
    for image in filter(None, (*images, _trained(encoder))):
        try:
            layouts = _probe(encoder, patches, attentions, image)
        # The encoder is not ours: it may raise anything at a size that it does not take.
        except Exception as error:
            reasons.append(f'{image[0]}×{image[1]}: {error}')
        else:
            return {module: layouts.get(module, _NO_CALL) for module in attentions}
    return dict.fromkeys(attentions, f'its model runs on no image tried ({"; ".join(reasons)})')


def _probe(
    encoder: nn.Module, patches: Any, attentions: list[nn.Module], image: Sequence[int]
) -> dict[nn.Module, Layout | str]:
    h, w = patch_grid(patches, image)
    index = torch.arange(h * w)
    bits = (index >> torch.arange((h * w - 1).bit_length())[:, None]) & 1
    # Image i shows the patches whose index has bit i, or has it not: together they tell all
    # patches apart. The first image is black.
    shown = torch.cat([bits, 1 - bits]).bool()
    rows, columns = (
        ((torch.arange(side) + pad) // step).clamp(max=last - 1)
        for (side, pad, step), last in zip(_sides(patches, image), (h, w), strict=True)
    )
    masks = torch.cat([shown[:1] & False, shown]).view(-1, 1, h, w)[..., rows, :][..., columns]
    noise = torch.randn(patches.in_channels, *image, generator=torch.Generator().manual_seed(0))
    result: dict[nn.Module, Layout | str] = {}

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        layout: Layout | str
        added = [name for name in OF_SCORES if kwargs.get(name) is not None]
        if attention_mask is not None:
            added.append(_ADDED)
        if key.shape[2] != query.shape[2]:
            layout = CROSS
        elif added:
            layout = f'it is given {added[-1]}'
        elif dropout:
            layout = _DROPOUT
        elif len(query) != len(masks):
            layout = _WINDOWS
        else:
            layout = _layout((query, key, value), shown)
        result[module] = layout if result.get(module, layout) == layout else _ORDER
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return value[:, :, : query.shape[2]].transpose(1, 2).contiguous()

    with _calling_probe(encoder, attentions), torch.no_grad():
        token = _RECORD.set(record)
        try:
            run(encoder, (masks * noise).to(patches.weight))
        finally:
            _RECORD.reset(token)
    return result


def _layout(projections: tuple[Tensor, ...], shown: Tensor) -> Layout | str:
    """Finds the tokens that differ from the black image's where their patch is shown."""
    x = torch.cat([y.transpose(1, 2).flatten(2) for y in projections], -1)
    rounding = torch.finfo(x.dtype).eps ** 0.5 * x[1:].abs().amax(-1)
    differs = ((x[1:] - x[:1]).abs().amax(-1) > rounding).cpu()
    tokens = differs.any(0).nonzero().flatten()
    count = shown.shape[1]
    if not torch.equal(differs[:, tokens], shown) or tokens[-1] - tokens[0] != count - 1:
        return _ORDER
    return Layout(int(tokens[0]), x.shape[1] - int(tokens[-1]) - 1)


@contextmanager
def _calling_probe(encoder: nn.Module, attentions: list[nn.Module]) -> Iterator[None]:
    """Has the attentions of an encoder call the probe, and leaves the encoder as it was."""
    # A first call installs hooks of transformers, with which a model cannot be pickled.
    before = [(m, vars(m).copy(), m._forward_hooks.copy()) for m in encoder.modules()]
    try:
        encoder.eval()
        for attention in attentions:
            # In training an attention says whether it drops weights.
            attention.training = True
            attention.config = calling(attention.config, _PROBE)
        yield
    finally:
        for module, attributes, hooks in before:
            for name in vars(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


def calling(config: Any, function: str) -> Any:
    """A copy of an attention's config that names another attention function."""
    config = copy.copy(config)
    config._attn_implementation_internal = function
    return config
