"""Where a checkpoint is: a path, a folder, a URL, or a name on a hub."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from ..errors import CheckpointError, CheckpointMissingError, OptionError, first_line
from .atomic_write import PARTIAL
from .published import SCHEME, address, local_file, published

_log = logging.getLogger(__name__)
_SECONDS_TO_ANSWER = 60
# The digest that torch's convention puts into the name of a file.
_DIGEST = re.compile(r'-([a-f0-9]{8,64})\.')
# Prefix of the names of timm's hub, as mmengine's 'torchvision://'.
_TIMM = 'timm://'
_HUB = ('hf-hub:', 'hf_hub:', 'hf://')
_LOCAL = 'local-dir:'
_WEB = ('http://', 'https://')
_OTHERS = ('ftp://', 'ftps://', 'sftp://')
# In a folder of transformers or timm, in the order of preference.
_FILES = (
    'model.safetensors',
    'model.safetensors.index.json',
    'pytorch_model.bin',
    'pytorch_model.bin.index.json',
    'open_clip_model.safetensors',
)


def shown(source: str) -> str:
    """A path or URL for messages: without user, password and query, which may hold a token."""
    if not source.startswith(_WEB + _OTHERS):
        return source
    parts = urlsplit(source)
    query = '…' if parts.query else ''
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2], query=query))


def without_password(source: str) -> str:
    """The downloaded file of a URL with a password, for logs of the argument; else the source."""
    return source if shown(source) == source else located(source)[0]


def located(source: str) -> list[str]:
    """The file of a checkpoint, or its shards; a URL is downloaded if it is not there yet.

    Raises a CheckpointError if there is none, or it cannot be downloaded.
    """
    if source.startswith(SCHEME):
        return [_published(source)]
    if source.startswith(_TIMM):
        return [_from_timm(source.removeprefix(_TIMM))]
    if source.startswith(_HUB):
        return _from_hub(source.partition(':')[2].lstrip('/'))
    if source.startswith(_WEB):
        return [_downloaded(source)]
    if source.startswith(_OTHERS):
        raise CheckpointError(
            f'{shown(source)!r} is not read: download the file and give its path, or give an '
            'http(s) URL'
        )
    path = os.path.expanduser(source.removeprefix(_LOCAL))
    if os.path.isdir(path):
        return _in_folder(Path(path))
    if os.path.exists(path):
        return [path]
    if re.fullmatch(r'[\w.-]+/[\w.-]+', source) and (cached := _cached(source)):
        return _in_folder(cached)
    raise CheckpointMissingError(
        f'there is no checkpoint {source!r} (looked for {os.path.abspath(path)}); '
        'give the path of a file or folder, an http(s) URL, or hf-hub:OWNER/NAME'
    )


def config_beside(source: str, name: str = 'config.json') -> dict[str, Any]:
    """The config that transformers or timm wrote beside the weights; empty without one."""
    if source.startswith(_TIMM) and name == 'config.json':
        # Only the weights are downloaded.
        import timm

        cfg = timm.get_pretrained_cfg(source.removeprefix(_TIMM))
        return {'pretrained_cfg': cfg.to_dict()} if cfg else {}
    path = Path(located(source)[0]).with_name(name)
    try:
        config = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _in_folder(folder: Path) -> list[str]:
    """The weights in a folder as transformers and timm write it."""
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise CheckpointMissingError(
            f'there are no weights in the folder {os.fspath(folder)!r}: it has none of '
            f'{", ".join(_FILES)}; give the file itself'
        )
    path = folder / name
    if not name.endswith('.index.json'):
        return [os.fspath(path)]
    return [os.fspath(folder / shard) for shard in sorted({*weight_map(path).values()})]


def weight_map(path: str | os.PathLike[str]) -> dict[str, str]:
    """Tensor → its shard, from the index in the folder of an index or a shard."""
    folder = Path(path).parent
    index = next(folder / n for n in _FILES if n.endswith('.index.json') and (folder / n).is_file())
    try:
        shards = dict(json.loads(index.read_text(encoding='utf-8'))['weight_map'])
        # Not a path: a stranger's index names files of this folder only.
        wrong = [shard for shard in shards.values() if Path(shard).name != shard]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f'{os.fspath(index)!r} is not an index of shards: {error}') from error
    wrong += [shard for shard in shards.values() if not (folder / shard).is_file()]
    if wrong or not shards:
        raise CheckpointMissingError(
            f'{os.fspath(index)!r} names shards that are not in its folder: '
            f'{", ".join(sorted({*wrong})[:8])}; copy the whole folder'
        )
    return shards


def _cached(name: str) -> Path | None:
    """The folder of a model in the local cache of the hub, without asking the network."""
    from huggingface_hub import try_to_load_from_cache

    # A path such as ./weights.pth cannot name a repository.
    with suppress(ValueError):
        paths = (try_to_load_from_cache(name, file) for file in _FILES)
        return next((Path(f).parent for f in paths if isinstance(f, str)), None)
    return None


def _from_hub(name: str) -> list[str]:
    """The weights of a model of the hub, from the cache or downloaded."""
    from huggingface_hub import snapshot_download

    with _hub_errors(f'hf-hub:{name}', 'its folder'):
        if cached := _cached(name):
            return _in_folder(cached)
        patterns = ['*config.json', 'model*.safetensors', 'model.safetensors.index.json']
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any((folder / file).is_file() for file in _FILES):
            # Not at once: many models have their weights in both formats.
            others = ['pytorch_model*', 'open_clip_model.safetensors']
            snapshot_download(name, allow_patterns=others)
        return _in_folder(folder)


@contextmanager
def _hub_errors(source: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Many classes of errors are raised without a network.
        raise CheckpointError(
            f'{source!r} cannot be downloaded ({first_line(error)}); on a machine without a '
            f'network give {remedy}'
        ) from error


def _published(source: str) -> str:
    """The file of `mmvttt://NAME`, downloaded if it is not here yet."""
    row = published(source)
    if file := local_file(row):
        return os.fspath(file)
    return _downloaded(address(row), f'mmvttt/{row.name}.pth')


def _downloaded(url: str, name: str = '') -> str:
    """The file of a URL in torch's cache, where it is called `name`."""
    import torch

    # Many sites have a file of this name: each URL has a folder.
    folder = hashlib.sha256(url.encode()).hexdigest()[:16]
    last = os.path.basename(urlparse(url).path).lstrip('.') or 'weights.pth'
    path = os.path.join(torch.hub.get_dir(), 'checkpoints', name or f'{folder}/{last}')
    if not os.path.isfile(path):
        try:
            _download(url, path)
        except (OSError, HTTPException, ValueError) as error:
            raise CheckpointError(f'{shown(url)!r} cannot be downloaded: {error}') from error
    return path


def _from_timm(name: str) -> str:
    """The file that timm's hub has under the name of a model and its tag, downloaded if needed."""
    import timm
    from huggingface_hub import hf_hub_download

    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag
        config = None
    if config is None or not config.hf_hub_id:
        raise CheckpointMissingError(
            f"timm's hub has no weights {name!r}: give a name of timm.list_pretrained(), such as "
            "'timm://vit_small_patch16_dinov3.lvd1689m'"
        )
    remedy = f'the file, model.safetensors of https://huggingface.co/{config.hf_hub_id}'
    with _hub_errors(f'{_TIMM}{name}', remedy):
        return hf_hub_download(config.hf_hub_id, config.hf_hub_filename or 'model.safetensors')


def _download(url: str, path: str) -> None:
    """Downloads a file, which gets its name once all of it is there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f'{path}.{os.getpid()}{PARTIAL}'
    _log.info('downloading %s to %s', shown(url), path)
    digest = hashlib.sha256()
    try:
        with (
            urlopen(_request(url), timeout=_SECONDS_TO_ANSWER) as answer,
            open(partial, 'wb') as file,
        ):
            while piece := answer.read(2**20):
                digest.update(piece)
                file.write(piece)
            expected = answer.headers.get('Content-Length')
            if expected is not None and file.tell() != int(expected):
                raise OSError(f'{file.tell()} of {expected} bytes came')
        named = _digest(os.path.basename(path))
        if named and not digest.hexdigest().startswith(named):
            raise OptionError(f'its digest is {digest.hexdigest()}, and its name has {named}')
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def _request(url: str) -> Request:
    """A request for a URL, whose user and password are sent as HTTP wants them."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition('@')
    request = Request(urlunsplit(parts._replace(netloc=host)))
    if user:
        token = b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header('Authorization', f'Basic {token}')
    return request


def _digest(name: str) -> str | None:
    """The digest in the name of a file, by torch's convention; eight decimals are a date or run."""
    match = _DIGEST.search(name)
    return match[1] if match and not re.fullmatch(r'\d{8}', match[1]) else None
