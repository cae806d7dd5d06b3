"""The architecture of public ViT³, H-ViT³ and T⁵ weights, by their names and shapes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmvttt.checkpoints.authors import authors_prefix
from mmvttt.errors import CheckpointError
from mmvttt.models.backbones import T5, HViT3, ViT3

_MARK = 'blocks.0.attn.w1'


@dataclass(frozen=True)
class Layout:
    """The backbone of some weights, on the meta device, and the prefix of its names, or `''`."""

    prefix: str
    model: nn.Module

    @property
    def name(self) -> str:
        """E.g. `'HViT3, tiny'`."""
        arch = {
            key: getattr(self.model, key)
            for key in ('embed_dims', 'depths', 'num_layers')
            if hasattr(self.model, key)
        }
        zoo = self.model.arch_zoo.items()
        size = next((n for n, a in zoo if all(a[k] == v for k, v in arch.items())), str(arch))
        return f'{type(self.model).__name__}, {size}'


def find_layout(weights: Mapping[str, Tensor]) -> Layout:
    """The architecture of a whole state dict with public names, by its shapes."""
    prefix = authors_prefix(weights)
    if prefix is None:
        begin = sorted({'.'.join(name.split('.')[:2]) for name in weights})[:6]
        raise CheckpointError(
            f'These are not the public names of a ViT³, an H-ViT³ or a T⁵: none ends in {_MARK}; '
            f'names begin with {", ".join(begin)}. Give a checkpoint of one of these models.'
        )
    hierarchical = f'{prefix}{_MARK}' not in weights
    inside = {n[len(prefix) :]: w for n, w in weights.items() if n.startswith(prefix)}
    try:
        with torch.device('meta'):
            if hierarchical:
                model = _h_vit3(inside)
            elif 'pos_embed' in inside:
                model = _t5(inside)
            else:
                arch, patches = _plain_sizes(inside)
                model = ViT3(arch, **patches)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f'The weights are damaged or of another model: names or shapes under {prefix!r} make '
            f'no sense ({type(error).__name__} {error}).'
        ) from error
    return Layout(prefix, model)


def _t5(weights: Mapping[str, Tensor]) -> T5:
    """The public models have SwiGLU or the two-layer model, with or without the convolutions."""
    arch, patches = _plain_sizes(weights)
    # All positions in a row, because a conversion does not resize.
    patch, count = patches['patch_size'], weights['pos_embed'].shape[1]
    mixer = dict(
        inner=dict(type='SwiGLU' if 'blocks.0.attn.w3' in weights else 'MLP'),
        locality='dwc_qk' if 'blocks.0.attn.q_conv2d.weight' in weights else None,
    )
    return T5(arch, mixer, img_size=(patch, count * patch), **patches)


def _plain_sizes(weights: Mapping[str, Tensor]) -> tuple[dict, dict]:
    """The arch of a plain backbone, and its patch size."""
    patch = weights['patch_embed.proj.weight']
    arch = dict(
        embed_dims=patch.shape[0],
        num_layers=_count(weights, r'blocks\.(\d+)\.'),
        num_heads=weights[_MARK].shape[-3],
        feedforward_channels=weights['blocks.0.mlp.fc1.weight'].shape[0],
    )
    return arch, dict(in_channels=patch.shape[1], patch_size=patch.shape[-1])


def _h_vit3(weights: Mapping[str, Tensor]) -> HViT3:
    count = _count(weights, r'layers\.(\d+)\.')
    first = [weights[f'layers.{s}.{_MARK}'] for s in range(count)]
    maps = {int(m[1]) for n in weights if (m := re.match(r'norm(\d+)\.', n))}
    stem = weights['patch_embed.conv.0.conv.weight']
    options: dict = dict(out_indices=sorted(maps)) if maps else dict(out_type='avg_featmap')
    return HViT3(
        dict(
            embed_dims=tuple(w.shape[-3] * w.shape[-1] for w in first),
            depths=tuple(_count(weights, rf'layers\.{s}\.blocks\.(\d+)\.') for s in range(count)),
            num_heads=tuple(w.shape[-3] for w in first),
        ),
        in_channels=stem.shape[1],
        **options,
    )


def _count(names: Iterable[str], pattern: str) -> int:
    return len({m[1] for name in names if (m := re.match(pattern, name))})
