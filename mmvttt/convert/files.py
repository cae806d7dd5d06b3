"""Converts checkpoint files, without running any code that a file may bring."""

import argparse
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.serialization import safe_globals

from mmvttt.errors import CheckpointError, CheckpointMissingError
from mmvttt.reliability.read import read_weights
from mmvttt.version import __version__

from .conversion import Conversion, to_ours, to_public
from .dit import PREFIX, dit_to_diffusers, dit_to_ours, dit_to_public, is_dit

_DIRECTIONS = {'ours': to_ours, 'public': to_public}
_OF_DIT = {'ours': dit_to_ours, 'public': dit_to_public, 'diffusers': dit_to_diffusers}
# What training scripts save beside the weights. A yacs configuration is read as a plain mapping,
# the one that torch fills; neither runs anything.
_HARMLESS: list[Any] = [(OrderedDict, 'yacs.config.CfgNode'), argparse.Namespace]


def read_checkpoint(checkpoint: str | os.PathLike[str], ema: bool = False) -> dict[str, Tensor]:
    """The named tensors of a file or URL.

    Beside what `read_weights` takes, the file may hold a yacs configuration or an argparse
    namespace, as training checkpoints do. Neither is interpreted, and yacs need not be there. A
    `.safetensors` file is read as such.

    Args:
        checkpoint: A file or http(s) URL.
        ema: Take the averaged weights of the file; see `read_weights`.

    Raises:
        CheckpointMissingError: There is no such file.
        CheckpointError: The file has no (averaged) weights, or can't be read without running code.
    """
    if os.fspath(checkpoint).endswith('.safetensors'):
        return _read_safetensors(os.fspath(checkpoint))
    with safe_globals(_HARMLESS):
        return read_weights(checkpoint, ema=ema)


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = 'ours',
    ema: bool = False,
) -> Conversion:
    """Converts a file, and writes the result where nothing is missing or left over.

    Args:
        source: A public (or our) checkpoint of ViT³, H-ViT³, T⁵, DiT³ or DiT.
        target: The file to write, with the weights under `model` (public) or `state_dict` (else);
            one in `.safetensors` holds the weights alone, as diffusers reads them.
        to: 'ours' or 'public'; for DiT also 'diffusers', the names of its `DiTTransformer2DModel`,
            in a `.pth` as a training of `mmvttt.LinearTransformer` loads them.
        ema: Take the averaged weights of the file, MESA's teacher for one.

    Returns:
        The conversion; `complete` says whether the target was written.

    Raises:
        CheckpointError: See `read_checkpoint`, `to_ours` and `to_public`.
    """
    if to not in _OF_DIT:
        raise ValueError(f'to={to!r}: choose one of {list(_OF_DIT)}.')
    weights = read_checkpoint(source, ema)
    directions = _OF_DIT if is_dit(weights) else _DIRECTIONS
    if to not in directions:
        raise CheckpointError(
            f'to={to!r} is for the weights of a DiT alone: choose ours or public.'
        )
    conversion = directions[to](weights)
    if conversion.complete and os.fspath(target).endswith('.safetensors'):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in conversion.weights.items()}, target)
    elif conversion.complete:
        meta = dict(mmvttt_version=__version__, model=conversion.name, source=Path(source).name)
        container = 'model' if to == 'public' else 'state_dict'
        # Of diffusers' model inside a mmvttt.DiffusionModel, for load_from.
        prefix = PREFIX if to == 'diffusers' else ''
        named = {f'{prefix}{name}': value for name, value in conversion.weights.items()}
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        torch.save({container: named, 'meta': meta}, target)
    return conversion


def _read_safetensors(path: str) -> dict[str, Tensor]:
    if not os.path.isfile(path):
        raise CheckpointMissingError(f'there is no checkpoint {path!r}; give the path of a file')
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f'{path!r} is damaged or no safetensors file: {error}') from error
