"""Checkpoints of DiT³ and DiT to ours and back: the authors' names, and diffusers' names of DiT."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mmvttt.errors import CheckpointError

from .conversion import Conversion
from .layouts import to_our_shape, to_public_shape

StateDict = Mapping[str, Tensor]

# Prefix of the model in a training checkpoint of ours.
PREFIX = 'transformer.'
_AUTHORS, _DIFFUSERS = 'x_embedder.proj.weight', 'transformer_blocks.0.attn1.to_q.weight'
_OURS = f'{PREFIX}final_modulation.weight'
# Our name → the authors', → diffusers'; in diffusers every block has the embedders, all alike.
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
    ('mixer', 'attn', None),
    ('cpe', 'cpe', None),
)


def is_dit(weights: StateDict) -> bool:
    """Whether the weights are of DiT³ or DiT, by the authors' names, diffusers' or ours."""
    return any(mark in weights for mark in (_AUTHORS, _DIFFUSERS, _OURS))


def dit_to_ours(weights: StateDict) -> Conversion:
    """Weights by the authors' or diffusers' names to those of a `mmvttt.DiffusionModel`.

    Raises:
        CheckpointError: The names are ours already, or a tensor has a shape that does not fit.
    """
    if _OURS in weights:
        raise CheckpointError(
            'These are mmvttt names already, which need no conversion to them: choose the other '
            'direction.'
        )
    if _DIFFUSERS in weights:
        return _from_diffusers(weights)
    dit3 = 'blocks.0.attn.w3' in weights
    own = _names_of(_depth(weights, 'blocks'), dit3)
    tensors = dict(weights)
    table = tensors.pop('pos_embed', None)
    names = {_rename(name, 1): f'{PREFIX}{name}' for name in own}
    result = _renamed('DiT3' if dit3 else 'DiT', tensors, names)
    if table is not None:
        result.dropped['pos_embed'] = _require_table(table)
    result.weights = {n: to_our_shape(n, value) for n, value in result.weights.items()}
    _require_shapes(result)
    return result


def dit_to_public(weights: StateDict, sample_size: int = 32) -> Conversion:
    """Weights of a `mmvttt.DiffusionModel` to the authors' names.

    Args:
        weights: Ours.
        sample_size: Side of the latents that the fixed `pos_embed` is for, which is a tensor there.

    Raises:
        CheckpointError: The weights are not ours.
    """
    kind = _require_ours(weights)
    own = _names_of(_depth(weights, f'{PREFIX}blocks'), kind == 'DiT3')
    result = _renamed(kind, weights, {f'{PREFIX}{name}': _rename(name, 1) for name in own})
    for old, new in result.matched.items():
        result.weights[new] = to_public_shape(old, weights[old])
    from mmvttt.models.generation.dit3 import position_table

    kernel = weights[f'{PREFIX}patch_embed.weight']
    side = sample_size // kernel.shape[-1]
    result.weights['pos_embed'] = position_table((side, side), len(kernel))[None]
    return result


def dit_to_diffusers(weights: StateDict) -> Conversion:
    """Weights of a DiT, ours or the authors', to those of diffusers' `DiTTransformer2DModel`.

    That model's embedding of the time is not the published one before
    `block.norm1.emb.time_proj.downscale_freq_shift = 0` in every block; its `norm_eps` is 1e-6.

    Raises:
        CheckpointError: The weights are of another model, of DiT³ for one.
    """
    if _AUTHORS in weights:
        found = dit_to_ours(weights)
        if not found.complete:
            return found
        weights = found.weights
    if _require_ours(weights) != 'DiT':
        raise CheckpointError(
            "diffusers has no DiT³: its names are for DiT's softmax attention. Build "
            'mmvttt.models.generation.dit3.DiT3, which saves and loads as models of diffusers do.'
        )
    result = Conversion('DiT')
    for name, value in weights.items():
        own = name.removeprefix(PREFIX)
        qkv = re.fullmatch(r'blocks\.(\d+)\.mixer\.qkv\.(\w+)', own)
        theirs = _rename(own, 2)
        if qkv:
            block = f'transformer_blocks.{qkv[1]}.attn1'
            for letter, part in zip('qkv', value.chunk(3), strict=True):
                result.weights[f'{block}.to_{letter}.{qkv[2]}'] = part.clone()
            result.matched[name] = f'{block}.to_{{q,k,v}}.{qkv[2]}'
        elif theirs is None:
            result.left_over.append(name)
        else:
            result.matched[name] = theirs
            depth = _depth(weights, f'{PREFIX}blocks') if '*' in theirs else 1
            for i in range(depth):
                # safetensors refuses tensors that share their memory.
                result.weights[theirs.replace('*', f'transformer_blocks.{i}')] = value.clone()
    return result


def _from_diffusers(weights: StateDict) -> Conversion:
    result = Conversion('DiT')
    expected = _names_of(_depth(weights, 'transformer_blocks'))
    names = {_rename(own, 2): own for own in expected}
    for name, value in weights.items():
        part = re.fullmatch(r'transformer_blocks\.(\d+)\.attn1\.to_([qkv])\.(\w+)', name)
        if part:
            thirds = [f'transformer_blocks.{part[1]}.attn1.to_{x}.{part[3]}' for x in 'qkv']
            own = f'{PREFIX}blocks.{part[1]}.mixer.qkv.{part[3]}'
            result.matched[name] = own
            if own not in result.weights and all(third in weights for third in thirds):
                result.weights[own] = torch.cat([weights[third] for third in thirds])
            continue
        shared = re.sub(r'^transformer_blocks\.\d+(?=\.norm1\.emb\.)', '*', name)
        if shared not in names:
            result.left_over.append(name)
            continue
        own = f'{PREFIX}{names[shared]}'
        if not torch.equal(result.weights.setdefault(own, value), value):
            raise CheckpointError(
                f'{name} is another one than in the blocks before: a DiT has one embedding of time '
                'and class. The checkpoint is damaged, or was trained with one for each block.'
            )
        result.matched[name] = own
    result.missing = [own for own in expected if f'{PREFIX}{own}' not in result.weights]
    _require_shapes(result)
    return result


def _rename(name: str, column: int) -> str | None:
    """Name of a tensor of ours in a column of the tables; None where that has no such tensor."""
    block = re.match(r'blocks\.(\d+)\.', name)
    rest = name[block.end() :] if block else name
    for row in _IN_BLOCKS if block else _NAMES:
        target = row[column]
        if target is not None and rest.startswith(f'{row[0]}.'):
            blocks = 'transformer_blocks' if column == 2 else 'blocks'
            head = f'{blocks}.{block[1]}.' if block else ''
            return f'{head}{target}{rest[len(row[0]) :]}'
    return None


def _renamed(kind: str, weights: StateDict, names: Mapping[str | None, str | None]) -> Conversion:
    """Every tensor by its new name, as it is."""
    result = Conversion(kind)
    for name, value in weights.items():
        new = names.get(name)
        if new is None:
            result.left_over.append(name)
        else:
            result.matched[name], result.weights[new] = new, value
    result.missing = [name for name in names if name and name not in weights]
    return result


def _depth(weights: StateDict, blocks: str) -> int:
    found = (re.match(rf'{re.escape(blocks)}\.(\d+)\.', name) for name in weights)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def _names_of(depth: int, dit3: bool = False) -> list[str]:
    """The tensors of a model of ours."""
    both = ('weight', 'bias')
    names = [f'{row[0]}.{kind}' for row in _NAMES for kind in both if row[0] != 'label_embed']
    inside = [f'{part[0]}.{kind}' for part in _IN_BLOCKS[:4] for kind in both]
    inside += [f'mixer.qkv.{kind}' for kind in both]
    if dit3:
        inside += ['mixer.w1', 'mixer.w2', 'mixer.w3', *(f'cpe.{kind}' for kind in both)]
    return [
        'label_embed.weight',
        *names,
        *(f'blocks.{i}.{n}' for i in range(depth) for n in inside),
    ]


def _require_ours(weights: StateDict) -> str:
    if _OURS not in weights:
        raise CheckpointError(
            f'These are not the weights of a mmvttt.DiffusionModel with a DiT or DiT³: {_OURS} is '
            'missing.'
        )
    return 'DiT3' if f'{PREFIX}blocks.0.mixer.w3' in weights else 'DiT'


def _require_table(value: Tensor) -> str:
    """Checks that a `pos_embed` is the fixed table, and returns why it is dropped."""
    from mmvttt.models.generation.dit3 import position_table

    side = round(value.shape[1] ** 0.5) if value.dim() == 3 else 0
    table = position_table((side, side), value.shape[-1])[None] if side else value.new_zeros(0)
    # Both in fp32, from angles up to the side.
    if table.shape != value.shape or not torch.allclose(table, value.float(), rtol=0, atol=1e-4):
        raise CheckpointError(
            'pos_embed is not the fixed table of a square map that DiT has: the model was trained '
            'with other positions, which DiT3 does not have.'
        )
    return 'the fixed table of positions; ours is made for the size of the model'


def _require_shapes(result: Conversion) -> None:
    """Compares all shapes with those that follow from the width of the model."""
    from mmvttt.models.generation.dit3 import DiT3

    if not result.complete:
        return
    found = {name.removeprefix(PREFIX): value for name, value in result.weights.items()}
    dims, channels, patch = found['patch_embed.weight'].shape[:3]
    dit3 = 'blocks.0.mixer.w3' in found
    heads = found['blocks.0.mixer.w1'].shape[0] if dit3 else 1
    depth = _depth(found, 'blocks')
    softmax = dict(type='mmvttt.TTTMixer', inner=dict(type='SoftmaxAttention'))
    with torch.device('meta'):
        model = DiT3(
            arch=dict(embed_dims=dims, num_layers=depth, num_heads=heads),
            patch_size=patch,
            in_channels=channels,
            out_channels=len(found['final_linear.bias']) // patch**2,
            num_classes=len(found['label_embed.weight']),
            null_class=False,
            mixer=None if dit3 else softmax,
            cpe=dit3,
        )
    for name, value in model.state_dict().items():
        if found[name].shape != value.shape:
            raise CheckpointError(
                f'{name} has the shape {tuple(found[name].shape)}, where {result.name} has '
                f'{tuple(value.shape)}: the checkpoint is damaged or of another model.'
            )
