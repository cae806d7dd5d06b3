"""Image encoders in models of transformers, and which of their tokens are the map of patches."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .replacement import CAUSAL, CROSS, NO_MAP, TUBES, MapSize

# Arguments by which attention functions of transformers change the scores or unpack images.
_OF_SCORES = ('position_bias', 'softcap', 's_aux', 'sliding_window', 'cu_seq_lens_q', 'cache')
_PROBE = f'{__name__}.probe'
_NO_CALL = 'it does not call the attention interface of transformers'
_NO_WEIGHTS = 'its model has no weights yet: load them first'
_ORDER = (
    'its tokens are not the patches of an image, row by row: they are dropped, merged, mixed, or '
    'in another order (windows, packed images)'
)
# Patches of the images that an encoder is tried on, which divide into windows.
_TRIED = (8, 16)


class Encoder(NamedTuple):
    """A module that takes images, by its name in the model.

    Attributes:
        name: Its name.
        patches: The name, inside of it, of the convolution that embeds the patches.
    """

    name: str
    patches: str

    def inside(self, name: str) -> str:
        """The name inside the encoder of a module of the model."""
        return name.removeprefix(f'{self.name}.')


class Layout(NamedTuple):
    """Numbers of tokens in front of the map and behind it, in the sequence of an attention."""

    prefix: int
    suffix: int


def encoders(model: nn.Module) -> dict[str, Encoder | str]:
    """The image encoder of each attention, by the attention's name, or why it is in none."""
    modules: dict[str, Any] = dict(model.named_modules())
    homes = {
        name: next((a for a in ancestors(name) if _takes_images(modules[a])), None)
        for name in _attentions(model)
    }
    found: dict[str | None, Encoder] = {}
    for name, module in modules.items():
        # A convolution belongs to the innermost of the modules that take images.
        home = next((a for a in ancestors(name) if a in homes.values()), None)
        if home is not None and _embeds_patches(module, modules[home]):
            found.setdefault(home, Encoder(home, name.removeprefix(f'{home}.')))
    other = TUBES if any(isinstance(m, nn.Conv3d) for m in modules.values()) else NO_MAP
    return {
        name: CAUSAL if modules[name].is_causal else found.get(home, other)
        for name, home in homes.items()
    }


def ancestors(name: str) -> Iterator[str]:
    """Names of the modules around a module, the nearest first, and '' at the end."""
    while name:
        name = name.rpartition('.')[0]
        yield name


def _attentions(model: nn.Module) -> dict[str, Any]:
    # transformers' attentions say so of themselves, and read their config in each call.
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, 'is_causal') and hasattr(module, 'config')
    }


def _takes_images(module: nn.Module) -> bool:
    return 'pixel_values' in inspect.signature(module.forward).parameters


def _embeds_patches(module: nn.Module, encoder: Any) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.in_channels == getattr(encoder.config, 'num_channels', 3)
        and module.kernel_size == module.stride
    )


def patch_grid(patches: Any, image: Sequence[int]) -> MapSize:
    """The size of the map that a convolution makes of an image of this height and width."""
    return MapSize(*(side // step for side, step in zip(image, patches.stride, strict=True)))


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


def layouts(encoder: nn.Module, patches: str) -> dict[str, Layout | str]:
    """Where each attention, by name, has the map, or why it cannot be replaced.

    A copy of the encoder runs once, on small images if it can, with attentions that return their
    values.
    """
    tensors = [*encoder.parameters(), *encoder.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return dict.fromkeys(_attentions(encoder), _NO_WEIGHTS)
    # It has the same tensors. A first call installs hooks, with which a model cannot be pickled.
    copied = copy.deepcopy(encoder, {id(tensor): tensor for tensor in tensors}).eval()
    names = _attentions(copied)
    embedding: Any = copied.get_submodule(patches)
    small = tuple(n * side for n, side in zip(_TRIED, embedding.stride, strict=True))
    reasons = []
    for image in filter(None, (small, _trained(copied))):
        try:
            layouts = _probe(copied, embedding, [*names.values()], image)
        # The encoder is not ours: it may raise anything at a size that it does not take.
        except Exception as error:
            reasons.append(f'{image[0]}×{image[1]}: {error}')
        else:
            return {name: layouts.get(module, _NO_CALL) for name, module in names.items()}
    return dict.fromkeys(names, f'its model runs on no image tried ({"; ".join(reasons)})')


@torch.no_grad()
def _probe(
    encoder: nn.Module, patches: Any, attentions: list[Any], image: tuple[int, ...]
) -> dict[nn.Module, Layout | str]:
    h, w = patch_grid(patches, image)
    bits = (torch.arange(h * w) >> torch.arange((h * w - 1).bit_length())[:, None]) & 1
    # Image i shows the patches whose index has bit i, or has it not: together they tell all
    # patches apart. The first image shows none.
    shown = torch.cat([bits, 1 - bits]).bool()
    masks = torch.cat([shown[:1] & False, shown]).view(-1, 1, h, w)
    result: dict[nn.Module, Layout | str] = {}

    def show(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        # A generator of its own leaves the process's random state as it is.
        noise = torch.randn(embedded.shape[1:], generator=torch.Generator().manual_seed(0))
        return (masks * noise).to(embedded)

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
        argument = beyond_ttt(attention_mask is not None, dropout, kwargs)
        if key.shape[2] != query.shape[2]:
            layout = CROSS
        elif argument:
            layout = f'it is given {argument}'
        else:
            layout = _layout((query, key, value), shown)
        result[module] = layout if result.get(module, layout) == layout else _ORDER
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        # Cross-attention has another number of keys, which may be smaller.
        tokens = torch.arange(query.shape[2]) % key.shape[2]
        return value[:, :, tokens].transpose(1, 2)

    for attention in attentions:
        # In training an attention says whether it drops weights.
        attention.training = True
        attention.config = calling(attention.config, _PROBE)
        attention.record = record
    handle = patches.register_forward_hook(show)
    try:
        run(encoder, patches.weight.new_zeros(len(masks), patches.in_channels, *image))
    finally:
        handle.remove()
    return result


AttentionInterface.register(
    _PROBE, lambda module, *args, **kwargs: (module.record(module, *args, **kwargs), None)
)


def beyond_ttt(masked: bool, dropout: float, options: Mapping[str, Any]) -> str | None:
    """An argument of an attention function that TTT cannot follow, in words, or None."""
    if dropout:
        return 'dropout of attention weights: set it to 0'
    if masked:
        return 'a mask, or biases of the scores'
    if options.get('is_causal'):
        return 'is_causal'
    return next((name for name in _OF_SCORES if options.get(name) is not None), None)


def _layout(projections: tuple[Tensor, ...], shown: Tensor) -> Layout | str:
    """Finds the tokens that differ from the first image's where their patch is shown."""
    x = torch.cat([y.transpose(1, 2).flatten(2) for y in projections], -1)
    rounding = torch.finfo(x.dtype).eps ** 0.5 * x[1:].abs().amax(-1)
    differs = ((x[1:] - x[:1]).abs().amax(-1) > rounding).cpu()
    tokens = differs.any(0).nonzero().flatten()
    count = shown.shape[1]
    if not torch.equal(differs[:, tokens], shown) or tokens[-1] - tokens[0] != count - 1:
        return _ORDER
    return Layout(int(tokens[0]), x.shape[1] - int(tokens[-1]) - 1)


def calling(config: Any, function: str) -> Any:
    """A copy of an attention's config that names another attention function."""
    config = copy.copy(config)
    config._attn_implementation_internal = function
    return config
