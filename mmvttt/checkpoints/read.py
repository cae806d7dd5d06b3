"""The one reader of checkpoints: tensors and plain data, never code; sizes and sums are checked."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import urlparse
from urllib.request import urlopen

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import safe_globals

from ..errors import CheckpointError, CheckpointMissingError, RefusedCheckpointError
from .allow_list import allowed
from .atomic_write import PARTIAL

_log = logging.getLogger(__name__)
# Where training scripts put the weights, in the order of preference.
_EMA = ('state_dict_ema', 'model_ema', 'ema')
# Prefix of averaged weights in our checkpoints: MESA's teacher.
_TEACHER = 'teacher.'
_CONTAINERS = ('state_dict', 'model', *_EMA)
_LISTED = 8
_SECONDS_TO_ANSWER = 60
# Messages of torch's weights-only reader; the last one comes with the others.
_REFUSED = (
    r'GLOBAL (\S+) was not an allowed',
    r'unsupported GLOBAL (\S+) whose',
    r'WeightsUnpickler error:\s*(.+)',
)
# The digest that torch's convention puts into the name of a file.
_DIGEST = re.compile(r'-([a-f0-9]{8,64})\.')

# Prefix of the names of timm's hub, as mmengine's 'torchvision://'.
_TIMM = 'timm://'

StateDict = Mapping[str, Tensor]


def read_weights(
    checkpoint: str | os.PathLike[str], map_location: Any = 'cpu', ema: bool = False
) -> dict[str, Tensor]:
    """The named tensors of a file or URL, as `read_content` reads it.

    Takes raw state dicts and those under `state_dict`, `model`, `state_dict_ema`, `model_ema` or
    `ema`, and drops DDP's `module.`. With `ema`, takes the averaged weights alone: the last three,
    or of a checkpoint of ours the average of an EMAHook, or MESA's teacher by the names of the
    student.

    Raises:
        CheckpointError: See `read_content`; or the file has no weights.
    """
    return named_tensors(read_content(checkpoint, map_location), os.fspath(checkpoint), ema)


def read_content(
    checkpoint: str | os.PathLike[str] | IO[bytes], map_location: Any = 'cpu', mmap: bool = False
) -> Any:
    """All that is in a file or at a URL, without running any code that it may bring.

    By the list of `allow_list`; torch's own is the same again afterwards. Checksums are compared,
    which torch writes and does not compare.

    Args:
        checkpoint: A path, an http(s) URL, `timm://` and the name of a model with its tag, or an
            open file. A file of safetensors is told by its name.
        map_location: As of `torch.load`.
        mmap: Leave the numbers in the file until they are used.

    Raises:
        TypeError: The checkpoint is no path.
        CheckpointMissingError: There is no such file.
        RefusedCheckpointError: It holds objects that would need pickle's code execution.
        CheckpointError: The file is no checkpoint, is damaged, or cannot be downloaded.
    """
    with ExitStack() as stack:
        if isinstance(checkpoint, str | os.PathLike):
            source: Any = os.fspath(checkpoint)
            path = _located(source)
            file: IO[bytes]
            try:
                # A pipe would wait for a writer.
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise CheckpointError(f'{source!r} is no plain file')
                file = stack.enter_context(open(path, 'rb'))
            except OSError as error:
                raise CheckpointError(f'{source!r} cannot be read: {error.strerror}') from error
        elif hasattr(checkpoint, 'read') and hasattr(checkpoint, 'seek'):
            source, path, file = getattr(checkpoint, 'name', 'the checkpoint'), '', checkpoint
        else:
            raise TypeError(
                f'checkpoint={checkpoint!r}: give the path of a file, or an http(s) URL'
            )
        try:
            if path.endswith('.safetensors'):
                return load_file(path, str(map_location))
            archive = file.read(2) == b'PK'
            if archive:
                _check_archive(file, source)
            file.seek(0)
            stack.enter_context(safe_globals(allowed()))
            mapped = bool(mmap and archive and path)
            return torch.load(
                path if mapped else file,
                map_location=map_location,
                weights_only=True,
                mmap=mapped or None,
            )
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            raise RefusedCheckpointError(
                f'{source!r} is not read: it holds {_refused_object(error)}, which is more than '
                'tensors and plain data, and reading that could run code (or it is no checkpoint). '
                'Where you trust its source, docs/safety.md shows how to make a plain checkpoint '
                'of it'
            ) from None
        except Exception as error:
            # The error of a damaged file depends on the place of the damage.
            raise CheckpointError(
                f'{source!r} is damaged or no checkpoint of torch ({type(error).__name__}: '
                f'{_first_line(error)}); download or save it again'
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition('\n')[0]


def _check_archive(file: IO[bytes], source: str) -> None:
    """Compares checksums, and the sizes of the parts with that of the file.

    torch would unpack compressed parts of any size, and read parts that lie on one another.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(p.compress_type != zipfile.ZIP_STORED for p in parts):
            problem = 'has compressed parts, as TorchScript has and torch.save never writes'
        elif sum(p.file_size for p in parts) > size:
            problem = 'is an archive whose parts lie on one another'
        elif damaged := archive.testzip():
            problem = f'is damaged: the checksum of its part {damaged!r} is wrong'
        else:
            return
    raise CheckpointError(f'{source!r} {problem}; download or save it again')


def _refused_object(error: pickle.UnpicklingError) -> str:
    """The object that torch's weights-only reader refused, out of its long message."""
    found = (re.search(pattern, str(error)) for pattern in _REFUSED)
    return next((f[1] for f in found if f), _first_line(error))


def _located(source: str) -> str:
    """The file of a path, or of a URL in torch's cache, downloaded if it is not there yet."""
    if source.startswith(_TIMM):
        return _from_timm(source.removeprefix(_TIMM))
    if not source.startswith(('http://', 'https://')):
        path = os.path.expanduser(source)
        if not os.path.exists(path) or os.path.isdir(path):
            raise CheckpointMissingError(
                f'there is no checkpoint {source!r} (looked for {os.path.abspath(path)}); '
                'give the path of a file, or an http(s) URL'
            )
        return path
    name = os.path.basename(urlparse(source).path).lstrip('.') or 'weights.pth'
    # Many sites have a file of this name: each URL has a folder.
    folder = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = os.path.join(torch.hub.get_dir(), 'checkpoints', folder, name)
    if not os.path.isfile(path):
        try:
            _download(source, path)
        except (OSError, HTTPException, ValueError) as error:
            raise CheckpointError(f'{source!r} cannot be downloaded: {error}') from error
    return path


def _from_timm(name: str) -> str:
    """The file that timm's hub has under the name of a model and its tag, downloaded if needed."""
    import timm
    from huggingface_hub import hf_hub_download

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        raise CheckpointMissingError(
            f"timm's hub has no weights {name!r}: give a name of timm.list_pretrained(), such as "
            "'timm://vit_small_patch16_dinov3.lvd1689m'"
        )
    try:
        return hf_hub_download(config.hf_hub_id, config.hf_hub_filename or 'model.safetensors')
    except Exception as error:
        # Many classes of errors are raised without a network.
        raise CheckpointError(
            f"'{_TIMM}{name}' cannot be downloaded ({_first_line(error)}); on a machine without a "
            f'network give the file, model.safetensors of https://huggingface.co/{config.hf_hub_id}'
        ) from error


def _download(url: str, path: str) -> None:
    """Downloads a file, which gets its name once all of it is there.

    Raises:
        OSError: The server does not answer for a minute, or ends early.
        ValueError: The digest in the name, by torch's convention, is of another content.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f'{path}.{os.getpid()}{PARTIAL}'
    _log.info('downloading %s to %s', url, path)
    digest = hashlib.sha256()
    try:
        with urlopen(url, timeout=_SECONDS_TO_ANSWER) as answer, open(partial, 'wb') as file:
            while piece := answer.read(2**20):
                digest.update(piece)
                file.write(piece)
            expected = answer.headers.get('Content-Length')
            if expected is not None and file.tell() != int(expected):
                raise OSError(f'{file.tell()} of {expected} bytes came')
        named = _DIGEST.search(os.path.basename(path))
        if named and not digest.hexdigest().startswith(named[1]):
            raise ValueError(f'its digest is {digest.hexdigest()}, and its name has {named[1]}')
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def under(weights: Mapping[Any, Any], prefix: str = '') -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {
        name[len(prefix) :]: v
        for name, v in weights.items()
        if isinstance(name, str) and name.startswith(prefix) and isinstance(v, Tensor)
    }


def named_tensors(content: Any, source: str, ema: bool = False) -> dict[str, Tensor]:
    """The weights in what `read_content` has read; `source` names it in the error."""
    containers: tuple[str, ...] = _EMA if ema else _CONTAINERS
    if ema and isinstance(content, Mapping) and 'ema_state_dict' in content:
        # mmengine's EMAHook has put the average in the place of the weights.
        containers = ('state_dict',)
    if isinstance(content, Mapping):
        held = [c for c in containers if isinstance(content.get(c), Mapping)]
        weights = content[held[0]] if held else content
        tensors = under(weights)
        if ema and not held:
            tensors = under(named_tensors(content, source), _TEACHER)
        if tensors:
            wrapped = all(name.startswith('module.') for name in tensors)
            return under(tensors, 'module.') if wrapped else tensors
        found = f'the keys {sorted(map(str, weights))[:_LISTED]}'
    else:
        found = f'a {type(content).__name__}'
    what, alone = ('averaged weights', '') if ema else ('weights', 'by itself or ')
    teacher = ", or with a teacher, 'teacher.…'" if ema else ''
    raise CheckpointError(
        f'{source!r} holds no {what} but {found}; allowed: a state dict, {alone}under '
        f'{", ".join(containers)}{teacher}'
    )
