"""Names and shapes of the public ViT³, H-ViT³ and T⁵ weights, and our names.

One rule, `public_name`, gives the public name of a tensor of ours. Inverted over all tensors of an
architecture, it gives our name of a public tensor: a name that it does not produce is not part of
the model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmvttt.errors import CheckpointError
from mmvttt.models.backbones import T5, HViT3, ViT3

# Inner weights have one more dimension of size 1 there: images, or input channels per group.
_EXTRA_DIMENSION = {'mixer.w1': 0, 'mixer.w2': 0, 'mixer.w3': 1}
_EXTRA_DIMENSION |= {'inner.w1': 0, 'inner.w2': 0, 'inner.w3': 0}
_MARK = 'blocks.0.attn.w1'
_DOWNSAMPLE = ('widen', 'halve', 'narrow')


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

    def names(self) -> dict[str, str]:
        """Our name of every tensor: its public name, without prefixes."""
        return {name: public_name(name) for name in self.model.state_dict()}


def find_layout(weights: Mapping[str, Tensor]) -> Layout:
    """The architecture of a whole state dict with public names, by its shapes."""
    marked = sorted((name for name in weights if name.endswith(_MARK)), key=len)
    if not marked:
        begin = sorted({'.'.join(name.split('.')[:2]) for name in weights})[:6]
        raise CheckpointError(
            f'These are not the public names of a ViT³, an H-ViT³ or a T⁵: none ends in {_MARK}; '
            f'names begin with {", ".join(begin)}. Give a checkpoint of one of these models.'
        )
    stem = marked[0].removesuffix(_MARK)
    hierarchical = re.fullmatch(r'(.*?)layers\.0\.', stem)
    prefix = hierarchical[1] if hierarchical else stem
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


def public_name(name: str) -> str:
    """The public name of a backbone's tensor: `stem.0.bn.bias` → `patch_embed.conv.0.norm.bias`.

    Plain ViT³ differs in the mixer's name alone, T⁵ in the names of its convolutions too.
    """
    name = re.sub(r'\.mixer\.([qk])_conv\.', r'.attn.\1_conv2d.', name)
    name = (
        name.replace('.mixer.inner.', '.attn.')
        .replace('.mixer.', '.attn.')
        .replace('.mlp.dwconv.', '.mlp.dwc.')
    )
    name = re.sub(r'^norms\.(\d+)\.', r'norm\1.', name)
    if stem := re.match(r'stem\.(\d+)\.(conv|bn)\.', name):
        kind = 'norm' if stem[2] == 'bn' else 'conv'
        return f'patch_embed.conv.{stem[1]}.{kind}.{name[stem.end() :]}'
    if down := re.match(r'stages\.(\d+)\.downsample\.(\w+)\.', name):
        # There the downsampling ends a stage; here it begins the next one.
        target = f'layers.{int(down[1]) - 1}.downsample.conv'
        rest = name[down.end() :]
        if down[2] == 'norm':
            return f'{target}.2.norm.{rest}'
        return f'{target}.{_DOWNSAMPLE.index(down[2])}.conv.{rest}'
    return re.sub(r'^stages\.', 'layers.', name)


def to_our_shape(name: str, value: Tensor) -> Tensor:
    """Removes the dimension of size 1 from a public inner weight; `name` is ours."""
    at = _extra_dimension(name)
    return value if at is None else value.squeeze(at)


def to_public_shape(name: str, value: Tensor) -> Tensor:
    """Adds the dimension of size 1 to one of our inner weights; `name` is ours."""
    at = _extra_dimension(name)
    return value if at is None else value.unsqueeze(at)


def _extra_dimension(name: str) -> int | None:
    return _EXTRA_DIMENSION.get('.'.join(name.split('.')[-2:]))
