"""The one reader of checkpoints: tensors and plain data, never code, and checksums compared."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor

from ..errors import CheckpointError, CheckpointMissingError

# Where training scripts put the weights, in the order of preference.
_EMA = ('state_dict_ema', 'model_ema')
_CONTAINERS = ('state_dict', 'model', *_EMA)
_LISTED = 8
# How torch's weights-only reader says what it refuses; the last one comes with the others.
_REFUSED = (
    r'GLOBAL (\S+) was not an allowed',
    r'unsupported GLOBAL (\S+) whose',
    r'WeightsUnpickler error:\s*(.+)',
)

StateDict = Mapping[str, Tensor]


def read_weights(
    checkpoint: str | os.PathLike[str], map_location: Any = 'cpu', ema: bool = False
) -> dict[str, Tensor]:
    """The named tensors of a file or URL, as `read_content` reads it.

    Takes raw state dicts and those under `state_dict`, `model`, `state_dict_ema` or `model_ema`,
    and drops DDP's `module.`. With `ema`, takes the averaged weights alone, the last two.

    Raises:
        CheckpointError: See `read_content`; or the file has no weights.
    """
    return named_tensors(read_content(checkpoint, map_location), os.fspath(checkpoint), ema)


def read_content(checkpoint: str | os.PathLike[str], map_location: Any = 'cpu') -> Any:
    """All that is in a file or at a URL, without running any code that it may bring.

    torch does not compare the checksums that it has written: a flipped bit would become a wrong
    weight. Here they are compared.

    Raises:
        TypeError: The checkpoint is no path.
        CheckpointMissingError: There is no such file.
        CheckpointError: The file is no checkpoint, is damaged, cannot be downloaded, or holds
            objects that would need pickle's code execution.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f'checkpoint={checkpoint!r}: give the path of a file, or an http(s) URL')
    source = os.fspath(checkpoint)
    path = _located(source)
    try:
        damaged = damaged_part(path)
        if damaged is not None:
            raise CheckpointError(
                f'{source!r} is damaged: the checksum of its part {damaged!r} is wrong; '
                f'download or save it again'
            )
        return torch.load(path, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f'{source!r} holds more than tensors, or is no checkpoint, and is not read: unpickling '
            'it could run code. If you trust it, write its weights to a new file once: '
            "torch.save(torch.load(FILE, weights_only=False)['model'], NEW_FILE). "
            f'What it stumbles over: {stumbling_block(error)}'
        ) from None
    except Exception as error:
        # What a damaged file raises depends on the place of the damage.
        raise CheckpointError(
            f'{source!r} is damaged or no checkpoint of torch ({type(error).__name__}: {error}); '
            'download or save it again'
        ) from error


def damaged_part(path: str | os.PathLike[str]) -> str | None:
    """The part of torch's archive whose checksum is wrong, or None; torch does not look at them."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def stumbling_block(error: pickle.UnpicklingError) -> str:
    """What torch's weights-only reader would not make, out of its long message."""
    found = (re.search(pattern, str(error)) for pattern in _REFUSED)
    return next((f[1] for f in found if f), str(error).strip().partition('\n')[0])


def _located(source: str) -> str:
    """The file of a path, or of a URL in torch's cache, downloaded if it is not there yet."""
    if not source.startswith(('http://', 'https://')):
        path = os.path.expanduser(source)
        if not os.path.isfile(path):
            raise CheckpointMissingError(
                f'there is no checkpoint {source!r} (looked for {os.path.abspath(path)}); '
                'give the path of a file, or an http(s) URL'
            )
        return path
    name = os.path.basename(urlparse(source).path)
    path = os.path.join(torch.hub.get_dir(), 'checkpoints', name)
    if not os.path.isfile(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            torch.hub.download_url_to_file(source, path)
        except OSError as error:
            raise CheckpointError(f'{source!r} cannot be downloaded: {error}') from error
    return path


def named_tensors(content: Any, source: str, ema: bool = False) -> dict[str, Tensor]:
    """The weights in what `read_content` has read; `source` names it in the error."""
    containers = _EMA if ema else _CONTAINERS
    if isinstance(content, Mapping):
        held = [c for c in containers if isinstance(content.get(c), Mapping)]
        weights = content[held[0]] if held else content
        tensors = {k: v for k, v in weights.items() if isinstance(k, str) and isinstance(v, Tensor)}
        if tensors and (held or not ema):
            if all(name.startswith('module.') for name in tensors):
                return {name.removeprefix('module.'): v for name, v in tensors.items()}
            return tensors
        found = f'the keys {sorted(map(str, weights))[:_LISTED]}'
    else:
        found = f'a {type(content).__name__}'
    what, alone = ('averaged weights', '') if ema else ('weights', 'by itself or ')
    raise CheckpointError(
        f'{source!r} holds no {what} but {found}; allowed: a state dict, {alone}under '
        f'{", ".join(containers)}'
    )
