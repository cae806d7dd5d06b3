"""Converts checkpoint files, without running any code that a file may bring."""

import os
from pathlib import Path

import torch

from mmvttt.reliability.read import read_weights
from mmvttt.version import __version__

from .conversion import Conversion, to_ours, to_public

_DIRECTIONS = {'ours': to_ours, 'public': to_public}


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = 'ours',
    ema: bool = False,
) -> Conversion:
    """Converts a file, and writes the result where nothing is missing or left over.

    Args:
        source: A public (or our) checkpoint of ViT³, H-ViT³ or T⁵.
        target: The file to write, with the weights under `state_dict` (ours) or `model` (public).
        to: 'ours' or 'public'.
        ema: Take the averaged weights of the file, MESA's teacher for one.

    Returns:
        The conversion; `complete` says whether the target was written.

    Raises:
        CheckpointError: See `read_weights`, `to_ours` and `to_public`.
    """
    if to not in _DIRECTIONS:
        raise ValueError(f'to={to!r}: choose one of {list(_DIRECTIONS)}.')
    conversion = _DIRECTIONS[to](read_weights(source, ema=ema))
    if conversion.complete:
        meta = dict(mmvttt_version=__version__, model=conversion.name, source=Path(source).name)
        container = 'state_dict' if to == 'ours' else 'model'
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        torch.save({container: conversion.weights, 'meta': meta}, target)
    return conversion
