"""Weights by the names of the authors of ViT³, H-ViT³, T⁵, DiT³ and DiT⁵ → ours.

Those of diffusers' DiT, too, with any mixer that `mmvttt.linearize` gave it.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from .families import Rules, add_once, renamed

# The first block's inner weight: what precedes it, and whether it is in stages.
_MARK = re.compile(r'(|.*?\.)(layers\.0\.)?blocks\.0\.attn\.w1')
# The first part of a backbone's names, after its prefix.
_BACKBONE = re.compile(r'(pos_embed|patch_embed|norm\d*|layers|blocks)\b')
_STEM: Rules = (
    (r'^patch_embed\.conv\.(\d+)\.conv\.', r'stem.\1.conv.'),
    (r'^patch_embed\.conv\.(\d+)\.norm\.', r'stem.\1.bn.'),
    (r'^norm(\d+)\.', r'norms.\1.'),
)
_IN_BLOCKS: Rules = (
    (r'\.attn\.([qk])_conv2d\.', r'.mixer.\1_conv.'),
    (r'\.attn\.', '.mixer.'),
    (r'\.mlp\.dwc\.', '.mlp.dwconv.'),
    (r'^layers\.', 'stages.'),
)
_DOWNSAMPLE = re.compile(r'layers\.(\d+)\.downsample\.conv\.([012])\.(conv|norm)\.')
_DIT_MARKS = {'x_embedder.proj.weight', 'y_embedder.embedding_table.weight'}
_DIT: Rules = (
    (r'x_embedder\.proj\.', 'patch_embed.'),
    (r't_embedder\.mlp\.0\.', 'time_embed.linear_1.'),
    (r't_embedder\.mlp\.2\.', 'time_embed.linear_2.'),
    (r'y_embedder\.embedding_table\.', 'label_embed.'),
    (r'final_layer\.adaLN_modulation\.1\.', 'final_modulation.'),
    (r'final_layer\.linear\.', 'final_linear.'),
    (r'(blocks\.\d+)\.adaLN_modulation\.1\.', r'\1.modulation.'),
    (r'(blocks\.\d+)\.mlp\.fc1\.', r'\1.mlp.net.0.proj.'),
    (r'(blocks\.\d+)\.mlp\.fc2\.', r'\1.mlp.net.2.'),
    (r'(blocks\.\d+)\.attn\.([qk])_conv2d\.', r'\1.mixer.\2_conv.'),
    (r'(blocks\.\d+)\.attn\.qk_(scale|offset)_ttt$', r'\1.mixer.qk_\2'),
    (r'(blocks\.\d+)\.attn\.', r'\1.mixer.'),
    (r'(blocks\.\d+)\.cpe\.', r'\1.cpe.'),
)
_DIFFUSERS_MARK = 'transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight'
# Each block of diffusers' has equal embedders of time and class.
_EMBEDDED = r'transformer_blocks\.\d+\.norm1\.emb\.'
_BLOCK = r'transformer_(blocks\.\d+)\.'
_DIFFUSERS: Rules = (
    (r'pos_embed\.proj\.', 'patch_embed.'),
    (rf'{_EMBEDDED}timestep_embedder\.', 'time_embed.'),
    (rf'{_EMBEDDED}class_embedder\.embedding_table\.', 'label_embed.'),
    (r'proj_out_1\.', 'final_modulation.'),
    (r'proj_out_2\.', 'final_linear.'),
    (rf'{_BLOCK}norm1\.linear\.', r'\1.modulation.'),
    (rf'{_BLOCK}ff\.', r'\1.mlp.'),
    (rf'{_BLOCK}attn1\.to_out\.0\.', r'\1.mixer.proj.'),
    (rf'{_BLOCK}attn1\.to_([qkv])\.', r'\1.mixer.\2.'),
    (rf'{_BLOCK}attn1\.processor\.', r'\1.mixer.'),
)
_INNER = re.compile(r'\.mixer\.(w[123])$')


def by_our_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights by our names, if they have the authors', or None for any others.

    The tensors are views of the given ones, so the authors' own model gets our weights by copying
    them into what is returned for its `state_dict()`. Names that no rule knows stay as they are.
    Rotary tables of one image size and DiT's fixed positions are left out.

    Raises:
        CheckpointError: Two names become one, or the positions are not DiT's.
    """
    if weights.keys() >= _DIT_MARKS:
        return _dit(weights)
    marks = sorted((m for m in map(_MARK.fullmatch, weights) if m), key=lambda m: len(m[0]))
    return _vit(weights, marks[0][1]) if marks else None


def _vit(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A ViT³, H-ViT³ or T⁵, by `backbone.…` and `head.fc.…`. A detector's heads stay."""
    is_t5 = f'{prefix}pos_embed' in weights
    tensors: dict[str, Tensor] = {}
    for theirs, value in weights.items():
        short = theirs.removeprefix(prefix)
        if 'rope.rotations' in theirs:
            continue
        ours = theirs
        if short in ('head.weight', 'head.bias'):
            ours = f'head.fc.{short.partition(".")[2]}'
        elif theirs.startswith(prefix) and _BACKBONE.match(short):
            ours = f'backbone.{_of_backbone(short)}'
        _add(tensors, ours, value, theirs, is_t5)
    return tensors


def _of_backbone(name: str) -> str:
    """Our name of a backbone's tensor: `patch_embed.conv.0.norm.bias` → `stem.0.bn.bias`."""
    if down := _DOWNSAMPLE.match(name):
        # There the downsampling ends a stage; here it begins the next one.
        part = 'norm' if down[3] == 'norm' else ('widen', 'halve', 'narrow')[int(down[2])]
        return f'stages.{int(down[1]) + 1}.downsample.{part}.{name[down.end() :]}'
    for pattern, ours in (*_STEM, *_IN_BLOCKS):
        name = re.sub(pattern, ours, name)
    return name


def _dit(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A DiT³, DiT⁵ or DiT, as the `transformer` of a `mmvttt.DiffusionModel`."""
    tensors: dict[str, Tensor] = {}
    for theirs, value in weights.items():
        if theirs == 'pos_embed':
            _require_table(value)
            continue
        ours = renamed(_DIT, theirs)
        if ours and ours.endswith(('.qk_scale', '.qk_offset')) and value.dim() == 4:
            # (1, 1, C, 2) there.
            value = value[0, 0].T
        name = f'transformer.{ours}' if ours else theirs
        _add(tensors, name, value, theirs, 'blocks.0.attn.w3' not in weights)
    return tensors


def _add(tensors: dict[str, Tensor], ours: str, value: Tensor, theirs: str, is_inner: bool) -> None:
    """Adds a tensor, without the dimension of size 1 that inner weights have there."""
    if inner := _INNER.search(ours):
        # The dimension of images, or of the input channels per group.
        at = 1 if inner[1] == 'w3' and not is_inner else 0
        value = value.squeeze(at) if value.dim() > at else value
        ours = _INNER.sub(r'.mixer.inner.\1', ours) if is_inner else ours
    add_once(tensors, ours, value, theirs)


def _require_table(value: Tensor) -> None:
    """Checks that a `pos_embed` is DiT's fixed table, which ours make for the size of the map."""
    _, rows, width = value.shape if value.dim() == 3 else (0, 0, 0)
    side, channels = round(rows**0.5), width // 4
    # As in DiT: columns, then rows, each sine and cosine.
    angles = torch.arange(side)[:, None] * 1e4 ** -(torch.arange(channels).double() / channels)
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    table = torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, 0)], 1)[None]
    # The authors' are in fp32, from angles up to the side.
    if table.shape != value.shape or not torch.allclose(table, value.double(), rtol=0, atol=1e-4):
        raise CheckpointError(
            'pos_embed is not the fixed table of a square map that DiT has: the model was trained '
            'with other positions, which DiT3 does not have.'
        )


def from_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights by the names of `DiT3`, if they are a DiT of diffusers, or None for any others.

    Raises:
        CheckpointError: The blocks have embedders of different values, which `DiT3` does not have.
    """
    if _DIFFUSERS_MARK not in weights:
        return None
    tensors: dict[str, Tensor] = {}
    for theirs, value in weights.items():
        ours = renamed(_DIFFUSERS, theirs) or theirs
        if not torch.equal(tensors.setdefault(ours, value), value):
            raise CheckpointError(
                f'{theirs} is another one than in the blocks before: DiT3 has one embedding of '
                'time and class, and the checkpoint was trained with one for each block.'
            )
    for name in [n for n in tensors if '.mixer.q.' in n]:
        thirds = [name.replace('.q.', f'.{part}.') for part in 'qkv']
        if all(third in tensors for third in thirds):
            tensors[name.replace('.q.', '.qkv.')] = torch.cat([tensors.pop(n) for n in thirds])
    return tensors
