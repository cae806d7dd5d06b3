"""Checkpoints of DiT³, DiT⁵ and DiT: the authors' and diffusers' names to ours."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .conversion import Conversion, to_our_shape

StateDict = Mapping[str, Tensor]

# Prefix of the model in a training checkpoint of ours.
PREFIX = 'transformer.'
_AUTHORS, _DIFFUSERS = 'x_embedder.proj.weight', 'transformer_blocks.0.attn1.to_q.weight'
OURS = f'{PREFIX}final_modulation.weight'
# Our name → the authors', → diffusers'; in diffusers every block has equal embedders.
_NAMES = (
    ('patch_embed', 'x_embedder.proj', 'pos_embed.proj'),
    ('time_embed.linear_1', 't_embedder.mlp.0', '*.norm1.emb.timestep_embedder.linear_1'),
    ('time_embed.linear_2', 't_embedder.mlp.2', '*.norm1.emb.timestep_embedder.linear_2'),
    ('label_embed', 'y_embedder.embedding_table', '*.norm1.emb.class_embedder.embedding_table'),
    ('final_modulation', 'final_layer.adaLN_modulation.1', 'proj_out_1'),
    ('final_linear', 'final_layer.linear', 'proj_out_2'),
)
_IN_BLOCKS = (
    ('modulation', 'adaLN_modulation.1', 'norm1.linear'),
    ('mlp.net.0.proj', 'mlp.fc1', 'ff.net.0.proj'),
    ('mlp.net.2', 'mlp.fc2', 'ff.net.2'),
    ('mixer.proj', 'attn.proj', 'attn1.to_out.0'),
    ('mixer.qkv', 'attn.qkv', None),
    # DiT⁵; in diffusers by the names of mmvttt.linearize.
    ('mixer.inner', 'attn', 'attn1.processor.inner'),
    ('mixer.q_conv', 'attn.q_conv2d', 'attn1.processor.q_conv'),
    ('mixer.k_conv', 'attn.k_conv2d', 'attn1.processor.k_conv'),
    ('mixer.qk_scale', 'attn.qk_scale_ttt', 'attn1.processor.qk_scale'),
    ('mixer.qk_offset', 'attn.qk_offset_ttt', 'attn1.processor.qk_offset'),
    # DiT³.
    ('mixer', 'attn', None),
    ('cpe', 'cpe', None),
)
AFFINE = ('mixer.qk_scale', 'mixer.qk_offset')


def is_authors_dit(weights: StateDict) -> bool:
    """Whether the weights are of DiT³, DiT⁵ or DiT by the authors' names."""
    return _AUTHORS in weights and 'y_embedder.embedding_table.weight' in weights


def is_dit(weights: StateDict) -> bool:
    """Whether the weights are of DiT³, DiT⁵ or DiT, by the authors' names, diffusers' or ours."""
    marks = (_AUTHORS, _DIFFUSERS, f'{PREFIX}{_DIFFUSERS}', OURS)
    return any(mark in weights for mark in marks)


def dit_to_ours(weights: StateDict) -> Conversion:
    """Converts weights with the authors' or diffusers' names for a `mmvttt.DiffusionModel`.

    Raises:
        CheckpointError: The names are ours already, or the positions are not DiT's.
    """
    if OURS in weights:
        raise CheckpointError('These are mmvttt names already, which need no conversion to them.')
    if f'{PREFIX}{_DIFFUSERS}' in weights:
        weights = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    if _DIFFUSERS in weights:
        return _from_diffusers(weights)
    kind = kind_of(weights, 'blocks.0.attn.w3', 'blocks.0.attn.w1')
    ours = names_of(depth_of(weights, 'blocks'), kind, 'blocks.0.attn.qk_scale_ttt' in weights)
    tensors = dict(weights)
    table = tensors.pop('pos_embed', None)
    names = {rename(name, 1): f'{PREFIX}{name}' for name in ours}
    result = renamed(kind, tensors, names)
    if table is not None:
        result.dropped['pos_embed'] = _require_table(table)
    result.weights = {n: _to_our_shape(n, value) for n, value in result.weights.items()}
    return result


def latent_size(content: Any, weights: StateDict) -> int | None:
    """Side of the latents of a checkpoint, if it is recorded.

    Args:
        content: The whole file: its `meta` has a training's config, or a conversion's record.
        weights: Its tensors, with the authors' `pos_embed`.
    """
    if 'pos_embed' in weights and _AUTHORS in weights:
        return round(weights['pos_embed'].shape[1] ** 0.5) * weights[_AUTHORS].shape[-1]
    meta = content.get('meta') if isinstance(content, Mapping) else None
    meta = meta if isinstance(meta, Mapping) else {}
    if isinstance(meta.get('sample_size'), int):
        return meta['sample_size']
    match = re.search(r'\bsample_size=(\d+)', str(meta.get('cfg', '')))
    return int(match[1]) if match else None


def _from_diffusers(weights: StateDict) -> Conversion:
    first = 'transformer_blocks.0.attn1.processor'
    kind = kind_of(weights, '', f'{first}.inner.w1')
    result = Conversion(kind)
    expected = names_of(
        depth_of(weights, 'transformer_blocks'), kind, f'{first}.qk_scale' in weights
    )
    names = {rename(ours, 2): ours for ours in expected}
    for name, value in weights.items():
        part = re.fullmatch(r'transformer_blocks\.(\d+)\.attn1\.to_([qkv])\.(\w+)', name)
        if part:
            thirds = [f'transformer_blocks.{part[1]}.attn1.to_{x}.{part[3]}' for x in 'qkv']
            ours = f'{PREFIX}blocks.{part[1]}.mixer.qkv.{part[3]}'
            result.matched[name] = ours
            if ours not in result.weights and all(third in weights for third in thirds):
                result.weights[ours] = torch.cat([weights[third] for third in thirds])
            continue
        shared = re.sub(r'^transformer_blocks\.\d+(?=\.norm1\.emb\.)', '*', name)
        if shared not in names:
            result.left_over.append(name)
            continue
        ours = f'{PREFIX}{names[shared]}'
        if not torch.equal(result.weights.setdefault(ours, value), value):
            raise CheckpointError(
                f'{name} is another one than in the blocks before: a DiT has one embedding of time '
                'and class. The checkpoint is damaged, or was trained with one for each block.'
            )
        result.matched[name] = ours
    result.missing = [ours for ours in expected if f'{PREFIX}{ours}' not in result.weights]
    return result


def rename(name: str, column: int) -> str | None:
    """Name of one of our tensors in a column of the tables; None if there is no such tensor."""
    block = re.match(r'blocks\.(\d+)\.', name)
    rest = name[block.end() :] if block else name
    for row in _IN_BLOCKS if block else _NAMES:
        target = row[column]
        if target is not None and f'{rest}.'.startswith(f'{row[0]}.'):
            blocks = 'transformer_blocks' if column == 2 else 'blocks'
            head = f'{blocks}.{block[1]}.' if block else ''
            return f'{head}{target}{rest[len(row[0]) :]}'
    return None


def renamed(kind: str, weights: StateDict, names: Mapping[str | None, str | None]) -> Conversion:
    """Every tensor by its new name, unchanged."""
    result = Conversion(kind)
    for name, value in weights.items():
        new = names.get(name)
        if new is None:
            result.left_over.append(name)
        else:
            result.matched[name], result.weights[new] = new, value
    result.missing = [name for name in names if name and name not in weights]
    return result


def depth_of(weights: StateDict, blocks: str) -> int:
    matches = (re.match(rf'{re.escape(blocks)}\.(\d+)\.', name) for name in weights)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def kind_of(weights: StateDict, of_dit3: str, of_dit5: str) -> str:
    """The model that has one of two tensors; DiT if both are missing."""
    return 'DiT3' if of_dit3 in weights else 'DiT5' if of_dit5 in weights else 'DiT'


def names_of(depth: int, kind: str, affine: bool) -> list[str]:
    """The tensors of a model of ours."""
    both = ('weight', 'bias')
    names = [f'{row[0]}.{end}' for row in _NAMES for end in both if row[0] != 'label_embed']
    parts = [row[0] for row in _IN_BLOCKS[:5]]
    if kind == 'DiT3':
        parts.append('cpe')
    elif kind == 'DiT5':
        parts += ['mixer.q_conv', 'mixer.k_conv']
    inside = [f'{part}.{end}' for part in parts for end in both]
    if kind == 'DiT3':
        inside += ['mixer.w1', 'mixer.w2', 'mixer.w3']
    elif kind == 'DiT5':
        inside += ['mixer.inner.w1', 'mixer.inner.w2', *(AFFINE if affine else ())]
    return [
        'label_embed.weight',
        *names,
        *(f'blocks.{i}.{n}' for i in range(depth) for n in inside),
    ]


def _to_our_shape(name: str, value: Tensor) -> Tensor:
    """An authors' tensor in our shape; `name` is ours. Scales are `(1, 1, C, 2)` there."""
    if name.endswith(AFFINE):
        return value.flatten(0, -2).T.contiguous() if value.shape[-1:] == (2,) else value
    return to_our_shape(name, value)


def _require_table(value: Tensor) -> str:
    """Checks that a `pos_embed` is the fixed table, and returns why it is dropped."""
    side = round(value.shape[1] ** 0.5) if value.dim() == 3 else 0
    channels = value.shape[-1] // 4
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
    return 'the fixed table of positions; ours is made for the size of the model'
