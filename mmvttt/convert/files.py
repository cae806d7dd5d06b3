"""Converts checkpoint files without running code from them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.checkpoints.authors import authors_prefix, vit3_to_ours
from mmvttt.checkpoints.conversion import Conversion
from mmvttt.checkpoints.dit import dit_to_ours, is_dit, latent_size
from mmvttt.checkpoints.match import is_of
from mmvttt.checkpoints.read import named_tensors, read_file
from mmvttt.errors import CheckpointError
from mmvttt.version import __version__

from .dit import dit_to_public


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = 'ours',
    ema: bool = False,
    sample_size: int | None = None,
    without: str | None = None,
) -> Conversion:
    """Converts a file, and writes the result if nothing is missing or left over.

    Of ViT³, H-ViT³ and T⁵, whose sizes the file does not tell, loading says what is missing.

    Args:
        source: A public checkpoint of ViT³, H-ViT³, T⁵, DiT³, DiT⁵ or DiT, or our DiT's.
        target: The file to write, with the weights under `state_dict`, or `model` (public).
        to: 'ours'; for DiT³, DiT⁵ and DiT also 'public', the authors' names.
        ema: Take the averaged weights of the file, such as MESA's teacher.
        sample_size: Side of the latents, of a DiT's fixed positions in a public file; None for what
            the source says.
        without: 'attention' or 'mlp' of the blocks is not written, so that it is initialised
            randomly (t5 Tab. 10).

    Returns:
        The conversion; its `complete` tells whether the target was written.

    Raises:
        CheckpointError: The weights are of another model; see also `read_weights` and `dit.py`.
    """
    content = read_file(source)
    weights = named_tensors(content, os.fspath(source), ema)
    dit, public = is_dit(weights), to == 'public'
    if to not in ('ours', 'public') or (public and not dit):
        raise CheckpointError(
            f'to={to!r}: these weights convert to {"ours or public" if dit else "ours"}.'
        )
    if sample_size is not None and not public:
        raise CheckpointError(
            f'sample_size={sample_size} is for public files of DiT³, DiT⁵ and DiT, whose positions '
            'are a tensor: leave it out.'
        )
    size = latent_size(content, weights) if dit and sample_size is None else sample_size
    conversion = dit_to_public(weights, size) if public else _to_ours(weights)
    if conversion.complete:
        for name in [name for name in conversion.weights if is_of(without, name)]:
            del conversion.weights[name]
        meta: dict[str, Any] = dict(
            mmvttt_version=__version__, model=conversion.name, source=Path(source).name
        )
        if ema:
            meta['averaged'] = True
        if size is not None:
            meta['sample_size'] = size
        container = 'model' if public else 'state_dict'
        with replacing(target) as partial, open(partial, 'wb') as file:
            torch.save({container: conversion.weights, 'meta': meta}, file)
    return conversion


def _to_ours(weights: Mapping[str, Tensor]) -> Conversion:
    if is_dit(weights):
        return dit_to_ours(weights)
    prefix = authors_prefix(weights)
    if prefix is None:
        begin = sorted({'.'.join(name.split('.')[:2]) for name in weights})[:6]
        raise CheckpointError(
            'These are not the public names of a ViT³, an H-ViT³ or a T⁵: none ends in '
            f'blocks.0.attn.w1; names begin with {", ".join(begin)}. Give a checkpoint of one of '
            'these models, or of a DiT.'
        )
    return vit3_to_ours(weights, prefix)
