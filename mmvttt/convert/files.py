"""Converts checkpoint files without running code from them."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.checkpoints.match import is_of
from mmvttt.checkpoints.read import named_tensors, read_content
from mmvttt.errors import CheckpointError
from mmvttt.version import __version__

from .conversion import Conversion, to_ours, to_public
from .dit import PREFIX, dit_to_diffusers, dit_to_ours, dit_to_public, is_dit, latent_size

_DIRECTIONS = {'ours': to_ours, 'public': to_public}
_OF_DIT = {'ours': dit_to_ours, 'public': dit_to_public, 'diffusers': dit_to_diffusers}


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
        source: A public (or our) checkpoint of ViT³, H-ViT³, T⁵, DiT³, DiT⁵ or DiT.
        target: The file to write, with the weights under `model` (public) or `state_dict` (else);
            a `.safetensors` file has only the weights, as diffusers reads them.
        to: 'ours' or 'public'; for DiT and DiT⁵ also 'diffusers', the names of its
            `DiTTransformer2DModel`, in a `.pth` as a training of `mmvttt.LinearTransformer` loads
            them.
        ema: Take the averaged weights of the file, such as MESA's teacher.
        sample_size: Side of the latents, of a DiT's fixed positions in a public file; None for what
            the source says.
        without: 'attention' or 'mlp' of the blocks is not written, so that it is initialised
            randomly (t5 Tab. 10).

    Returns:
        The conversion; its `complete` tells whether the target was written.

    Raises:
        CheckpointError: See `read_weights`, `to_ours` and `to_public`.
    """
    content = read_content(source)
    weights = named_tensors(content, os.fspath(source), ema)
    dit = is_dit(weights)
    directions: Any = _OF_DIT if dit else _DIRECTIONS
    if to not in directions:
        raise CheckpointError(f'to={to!r}: these weights convert to {" or ".join(directions)}.')
    size = latent_size(content, weights) if dit and sample_size is None else sample_size
    options = dict(sample_size=size) if dit and to == 'public' else {}
    if sample_size is not None and not options:
        raise CheckpointError(
            f'sample_size={sample_size} is for public files of DiT³, DiT⁵ and DiT, whose positions '
            'are a tensor: leave it out.'
        )
    conversion = directions[to](weights, **options)
    left = [name for name in conversion.weights if is_of(without, name)]
    for name in left if conversion.complete else ():
        del conversion.weights[name]
    if conversion.complete and os.fspath(target).endswith('.safetensors'):
        weights = {name: value.contiguous() for name, value in conversion.weights.items()}
        with replacing(target) as partial:
            save_file(weights, partial)
    elif conversion.complete:
        meta: dict[str, Any] = dict(
            mmvttt_version=__version__, model=conversion.name, source=Path(source).name
        )
        if ema:
            meta['averaged'] = True
        if size is not None:
            meta['sample_size'] = size
        container = 'model' if to == 'public' else 'state_dict'
        # Prefix of diffusers' model inside a mmvttt.DiffusionModel, for load_from.
        prefix = PREFIX if to == 'diffusers' else ''
        named = {f'{prefix}{name}': value for name, value in conversion.weights.items()}
        with replacing(target) as partial, open(partial, 'wb') as file:
            torch.save({container: named, 'meta': meta}, file)
    return conversion
