"""timm's transformers in stages with attention of all tokens of a map: CAFormer, PiT, VOLO."""

from collections.abc import Mapping
from typing import Any

from timm.layers import Attention
from timm.models import metaformer, volo
from timm.models.metaformer import MetaFormer
from timm.models.pit import PoolingVisionTransformer
from torch import Tensor, cat, nn

from mmvttt.errors import OptionError

from ..layers.conv import map_size
from . import vit
from .replacement import MapSize, Note, Replacement

MODELS = (MetaFormer, PoolingVisionTransformer, volo.VOLO)


def attentions(model: nn.Module) -> dict[str, nn.Module | str]:
    """All attentions of the blocks by name, or the reason why one cannot be replaced."""
    kinds = (metaformer.Attention, volo.Attention, Attention, Replacement)
    parts: dict[str, nn.Module | str] = {
        name: vit.reason_in(module) or module
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    }
    if not parts:
        raise OptionError(
            f'this {type(model).__name__} has no attention, but pools or convolutions'
        )
    return parts


def replacement(model: nn.Module, attention: nn.Module, options: Mapping[str, Any]) -> Replacement:
    """A TTT attention with all that timm's attention has, to replace it."""
    if isinstance(model, PoolingVisionTransformer):
        return vit.TTTAttention(attention, model.num_tokens, **options)
    return _MapAttention(attention, 0, **options)


def install(
    model: nn.Module,
    built: Mapping[str, Replacement],
    left: Mapping[str, nn.Module | str],
    note: Note,
) -> list[str]:
    """Puts in replacements and stages, and returns the names of the new parameters."""
    stages = {name.partition('.blocks.')[0] for name in built}
    if isinstance(model, MetaFormer):
        for name in left:
            if name.partition('.blocks.')[0] in stages:
                raise OptionError(
                    f'{name} is left in a stage whose tokens would be a map: replace all '
                    'attentions of a stage, or none.'
                )
    new = vit.put_in_place(model, built, left, note)
    for name in () if isinstance(model, volo.VOLO) else stages:
        stage = model.get_submodule(name)
        if isinstance(model, MetaFormer):
            # A map (B, h, w, C) goes through the blocks: their other layers take channels last.
            stage.use_nchw = True
            stage.downsample.register_forward_hook(_to_channels_last, prepend=True)
            stage.register_forward_hook(_to_channels_first, prepend=True)
        else:
            parent, _, child = name.partition('.')
            setattr(model.get_submodule(parent), child, _PiTStage(stage))
    return new


def _to_channels_last(module: nn.Module, args: tuple[Tensor], x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def _to_channels_first(module: nn.Module, args: tuple[Tensor], x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


class _MapAttention(vit.TTTAttention):
    """An attention whose tokens are a map `(B, h, w, C)`, as VOLO's are."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        size = MapSize(*x.shape[1:3])
        return super().forward(x.flatten(1, 2), hw=size).unflatten(1, tuple(size))


class _PiTStage(nn.Module):
    """A `Transformer` of PiT, with its names, that passes its map's size to its blocks."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.pool, self.norm, self.blocks = source.pool, source.norm, source.blocks
        self.train(source.training)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, tokens = inputs
        if self.pool is not None:
            x, tokens = self.pool(x, tokens)
        size, prefix = MapSize(*map_size(x)), tokens.shape[1]
        y = self.norm(cat((tokens, x.flatten(2).transpose(1, 2)), 1))
        for block in self.blocks:
            y = block(y, attn_mask=size)
        return y[:, prefix:].transpose(1, 2).unflatten(2, tuple(size)), y[:, :prefix]
