"""timm's transformers in stages with attention of all tokens of a map: CAFormer, PiT, VOLO."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from timm.layers import Attention
from timm.models import checkpoint_seq, metaformer, volo
from timm.models.metaformer import MetaFormer, MetaFormerBlock
from timm.models.pit import PoolingVisionTransformer
from torch import Tensor, cat, nn

from . import vit
from .replacement import MapSize, Note, Replacement

MODELS = (MetaFormer, PoolingVisionTransformer, volo.VOLO)


def attentions(model: nn.Module) -> dict[str, nn.Module | str]:
    """All attentions of the blocks by name; a reason in the place of one that is not taken."""
    kinds = (metaformer.Attention, volo.Attention, Attention, Replacement)
    parts: dict[str, nn.Module | str] = {
        name: vit.reason_in(module) or module
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    }
    if not parts:
        raise ValueError(f'this {type(model).__name__} has no attention, but pools or convolutions')
    return parts


def replacement(model: nn.Module, attention: nn.Module, options: Mapping[str, Any]) -> Replacement:
    """A TTT attention with all that timm's attention has, to replace it."""
    if isinstance(attention, volo.Attention):
        return _MapAttention(attention, 0, **options)
    prefix = model.num_tokens if isinstance(model, PoolingVisionTransformer) else 0
    return vit.TTTAttention(attention, prefix, **options)


def install(
    model: nn.Module,
    built: Mapping[str, Replacement],
    left: Mapping[str, nn.Module | str],
    note: Note,
) -> list[str]:
    """Puts replacements and stages into their places; returns the names of the new parameters."""
    new = vit.put_in_place(model, built, left, note)
    if isinstance(model, volo.VOLO):
        return new
    kind = _PiTStage if isinstance(model, PoolingVisionTransformer) else _CAFormerStage
    for name in {name.partition('.blocks.')[0] for name in built}:
        parent, _, child = name.partition('.')
        setattr(model.get_submodule(parent), child, kind(model.get_submodule(name)))
    return new


class _MapAttention(vit.TTTAttention):
    """The attention of VOLO, whose tokens are a map `(B, h, w, C)`."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        size = MapSize(*x.shape[1:3])
        return super().forward(x.flatten(1, 2), hw=size).unflatten(1, tuple(size))


class _CAFormerStage(nn.Module):
    """A `MetaFormerStage` that passes the size of its map to its blocks; names are the source's."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.downsample = source.downsample
        blocks = source.blocks
        self.blocks = nn.Sequential(
            *(_Block(b) if isinstance(b.token_mixer, Replacement) else b for b in blocks)
        )
        self.set_grad_checkpointing(source.grad_checkpointing)
        self.train(source.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Computes the blocks once more in the backward pass."""
        self.grad_checkpointing = enable

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        size = MapSize.of(x)
        x = x.flatten(2).transpose(1, 2)
        blocks = [partial(b, hw=size) if isinstance(b, _Block) else b for b in self.blocks]
        if self.grad_checkpointing:
            x = checkpoint_seq(blocks, x)
        else:
            for block in blocks:
                x = block(x)
        return x.transpose(1, 2).unflatten(2, tuple(size))


class _Block(nn.Module):
    """A `MetaFormerBlock` that passes the size of the map to its token mixer."""

    def __init__(self, source: MetaFormerBlock) -> None:
        super().__init__()
        for name, child in source.named_children():
            setattr(self, name, child)
        self.train(source.training)

    def forward(self, x: Tensor, hw: MapSize) -> Tensor:
        y = self.drop_path1(self.token_mixer(self.norm1(x), hw=hw))
        x = self.res_scale1(x) + self.layer_scale1(y)
        y = self.drop_path2(self.mlp(self.norm2(x)))
        return self.res_scale2(x) + self.layer_scale2(y)


class _PiTStage(nn.Module):
    """A `Transformer` of PiT that passes its map's size to its blocks; names are the source's."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.pool, self.norm, self.blocks = source.pool, source.norm, source.blocks
        self.train(source.training)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, tokens = inputs
        if self.pool is not None:
            x, tokens = self.pool(x, tokens)
        size, prefix = MapSize.of(x), tokens.shape[1]
        y = self.norm(cat((tokens, x.flatten(2).transpose(1, 2)), 1))
        for block in self.blocks:
            y = block(y, attn_mask=size)
        return y[:, prefix:].transpose(1, 2).unflatten(2, tuple(size)), y[:, :prefix]
