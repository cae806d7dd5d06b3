"""Weights of a DiT by diffusers' names, with any mixer that `mmvttt.linearize` gave it → ours."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from .families import Rules, renamed

_MARK = 'transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight'
# Each block of diffusers' has equal embedders of time and class.
_EMBEDDED = r'transformer_blocks\.\d+\.norm1\.emb\.'
_BLOCK = r'transformer_(blocks\.\d+)\.'
_RULES: Rules = (
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


def from_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights by the names of `DiT3`, if they are a DiT of diffusers; None for any others.

    Raises:
        CheckpointError: The blocks have embedders of different values, which `DiT3` does not have.
    """
    if _MARK not in weights:
        return None
    tensors: dict[str, Tensor] = {}
    for theirs, value in weights.items():
        ours = renamed(_RULES, theirs) or theirs
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
