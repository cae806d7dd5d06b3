"""Converts checkpoint files without running code from them."""

import os
from pathlib import Path
from typing import Any

import torch

from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.checkpoints.conversion import Conversion
from mmvttt.checkpoints.dit import dit_to_ours, is_dit, latent_size
from mmvttt.checkpoints.match import is_of
from mmvttt.checkpoints.read import named_tensors, read_file
from mmvttt.errors import CheckpointError
from mmvttt.version import __version__

from .conversion import to_ours
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
        CheckpointError: See `read_weights`, `to_ours` and `dit_to_public`.
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
    if public:
        conversion = dit_to_public(weights, size)
    else:
        conversion = (dit_to_ours if dit else to_ours)(weights)
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
