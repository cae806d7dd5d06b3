"""Converts checkpoint files, without running any code that a file may bring."""

import argparse
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from mmvttt.reliability.read import read_weights
from mmvttt.version import __version__

from .conversion import Conversion, to_ours, to_public

_DIRECTIONS = {'ours': to_ours, 'public': to_public}
# What training scripts save beside the weights. A yacs configuration is read as a plain mapping,
# the one that torch fills; neither runs anything.
_HARMLESS: list[Any] = [(OrderedDict, 'yacs.config.CfgNode'), argparse.Namespace]


def read_checkpoint(checkpoint: str | os.PathLike[str], ema: bool = False) -> dict[str, Tensor]:
    """The named tensors of a file or URL.

    Beside what `read_weights` takes, the file may hold a yacs configuration or an argparse
    namespace, as training checkpoints do. Neither is interpreted, and yacs need not be there.

    Args:
        checkpoint: A file or http(s) URL.
        ema: Take the averaged weights of the file; see `read_weights`.

    Raises:
        CheckpointMissingError: There is no such file.
        CheckpointError: The file has no (averaged) weights, or can't be read without running code.
    """
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
        source: A public (or our) checkpoint of ViT³, H-ViT³ or T⁵.
        target: The file to write, with the weights under `state_dict` (ours) or `model` (public).
        to: 'ours' or 'public'.
        ema: Take the averaged weights of the file, MESA's teacher for one.

    Returns:
        The conversion; `complete` says whether the target was written.

    Raises:
        CheckpointError: See `read_checkpoint`, `to_ours` and `to_public`.
    """
    if to not in _DIRECTIONS:
        raise ValueError(f'to={to!r}: choose one of {list(_DIRECTIONS)}.')
    conversion = _DIRECTIONS[to](read_checkpoint(source, ema))
    if conversion.complete:
        meta = dict(mmvttt_version=__version__, model=conversion.name, source=Path(source).name)
        container = 'state_dict' if to == 'ours' else 'model'
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        torch.save({container: conversion.weights, 'meta': meta}, target)
    return conversion
