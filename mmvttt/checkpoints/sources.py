"""Where a checkpoint is: a path, a folder, a URL, or a name on a hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ..errors import CheckpointError, CheckpointMissingError, first_line
from ..text import one_line
from .download import cache, download, is_damaged, without_secrets
from .file_kind import problem
from .preparation import Preparation
from .published import SCHEME, name_at, published, published_file

# Prefix of the names of timm's hub, as mmengine's 'torchvision://'.
_TIMM = 'timm://'
_HUB = ('hf-hub:', 'hf_hub:', 'hf://')
_LOCAL = 'local-dir:'
_WEB = ('http://', 'https://')
# In a folder of transformers or timm, in the order of preference.
_FILES = (
    'model.safetensors',
    'model.safetensors.index.json',
    'pytorch_model.bin',
    'pytorch_model.bin.index.json',
    'open_clip_model.safetensors',
)

# A config is small; what is larger is none.
_LARGEST_CONFIG = 2**24


@dataclass(frozen=True)
class Source:
    """A checkpoint, resolved once: its files and what lies beside them.

    Attributes:
        name: The name for messages, without password and query.
        files: The file, or its shards.
        index: Tensor → the name of its shard, if an index says so.
        timm_config: timm's config of weights from its hub, of which only the file is downloaded.
        entry: The entry with the weights, where the table of published ones names it.
    """

    name: str
    files: tuple[Path, ...]
    index: Mapping[str, str] | None = None
    timm_config: Mapping[str, Any] = field(default_factory=dict)
    entry: str = ''

    def config(self, name: str = 'config.json') -> dict[str, Any]:
        """The config that transformers or timm wrote beside the weights, or an empty one."""
        path = self.files[0].with_name(name)
        if self.timm_config and name == 'config.json':
            return {'pretrained_cfg': dict(self.timm_config)}
        try:
            # A pipe would block.
            if not path.is_file() or path.stat().st_size > _LARGEST_CONFIG:
                return {}
            config = json.loads(path.read_text(encoding='utf-8'))
        except (OSError, ValueError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    @cached_property
    def preparation(self) -> Preparation | None:
        """Mean and deviation of the images of the training, from the files beside the weights."""
        for file, key, prefix in (
            ('config.json', 'pretrained_cfg', ''),
            ('preprocessor_config.json', None, 'image_'),
            ('open_clip_config.json', 'preprocess_cfg', ''),
        ):
            content: Any = self.config(file)
            entries = content.get(key) if key else content
            values: list[Any] = [
                entries.get(f'{prefix}{name}') if isinstance(entries, Mapping) else None
                for name in ('mean', 'std')
            ]
            if all(map(_are_numbers, values)):
                return Preparation([*values[0]], [*values[1]])
        return None

    def intact(self) -> Source:
        """Returns itself, each file compared with the digest of its download or in its name.

        Raises:
            CheckpointError: A file has changed, or cannot be read.
        """
        for path in self.files:
            source = os.fspath(path)
            if path.exists() and not path.is_file():
                # A pipe would block.
                raise CheckpointError(f'{source!r} is not a regular file')
            try:
                expected = is_damaged(path)
                open(path, 'rb').close()
            except OSError as error:
                raise CheckpointError(f'{source!r} cannot be read: {error.strerror}') from error
            if expected:
                raise CheckpointError(
                    f'{source!r} is damaged: its digest is another than {expected}; delete it and '
                    'download it again (or rename it, if the digits in its name are no digest)'
                )
        return self


def _are_numbers(values: Any) -> bool:
    listed = isinstance(values, list | tuple) and len(values) > 0
    return listed and all(type(x) in (int, float) and abs(x) < 1e3 for x in values)


def without_password(source: str) -> str:
    """The downloaded file of a URL with a password, for logs of the argument; else the source."""
    return source if without_secrets(source) == source else os.fspath(find_source(source).files[0])


def find_source(checkpoint: str | os.PathLike[str]) -> Source:
    """The file of a checkpoint, or its shards. A URL is downloaded if it is not there yet.

    Raises:
        TypeError: It is not a path.
        CheckpointMissingError: The file or folder does not exist.
        CheckpointError: It cannot be downloaded.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f'checkpoint={checkpoint!r}: give the path of a file, or an http(s) URL')
    source = os.fspath(checkpoint)
    # Metafiles, which other programs read too, have the authors' addresses.
    source = name_at(source) or source
    if source.startswith(SCHEME):
        return Source(source, (published_file(source),), entry=published(source).entry)
    if source.startswith(_TIMM):
        return _from_timm(source)
    if source.startswith(_HUB):
        return _in_folder(_from_hub(source.partition(':')[2].lstrip('/')), source)
    if source.startswith(_WEB):
        return Source(one_line(without_secrets(source)), (_downloaded(source),))
    path = Path(os.path.expanduser(source.removeprefix(_LOCAL)))
    if path.is_dir():
        return _in_folder(path, source)
    if path.exists():
        return Source(one_line(source), (path,))
    if re.fullmatch(r'[\w.-]+/[\w.-]+', source) and (cached := _cached(source)):
        return _in_folder(cached, source)
    raise CheckpointMissingError(
        f'there is no checkpoint {without_secrets(source)!r} (from {os.getcwd()}); '
        'give the path of a file or folder, an http(s) URL, or hf-hub:OWNER/NAME'
    )


def _in_folder(folder: Path, source: str) -> Source:
    """The weights in a folder as transformers and timm write it."""
    source = one_line(source)
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise CheckpointMissingError(
            f'there are no weights in the folder {os.fspath(folder)!r}: it has none of '
            f'{", ".join(_FILES)}; give the file itself'
        )
    if not name.endswith('.index.json'):
        return Source(source, (folder / name,))
    index = _shards(folder / name)
    return Source(source, tuple(folder / shard for shard in sorted({*index.values()})), index)


def _shards(index: Path) -> dict[str, str]:
    """Tensor → its shard, from an index in the shards' folder."""
    folder = index.parent
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


def _cached(name: str, **version: Any) -> Path | None:
    """The folder of a whole model in the local cache of the hub, without asking the network."""
    from huggingface_hub import try_to_load_from_cache

    # A path such as ./weights.pth cannot name a repository. Of an interrupted download the index
    # may be there, and not all shards.
    with suppress(ValueError, CheckpointError):
        paths = (try_to_load_from_cache(name, file, **version) for file in _FILES)
        if folder := next((Path(f).parent for f in paths if isinstance(f, str)), None):
            _in_folder(folder, name)
            return folder
    return None


def _from_hub(name: str) -> Path:
    """The folder of a model of the hub, `OWNER/NAME[@REVISION]`, from the cache or downloaded."""
    from huggingface_hub import snapshot_download

    with _hub_errors(f'hf-hub:{name}', 'its folder'):
        name, _, text = name.partition('@')
        version: dict[str, Any] = dict(revision=text) if text else {}
        if cached := _cached(name, **version):
            return cached
        patterns = ['*config.json', 'model*.safetensors', 'model.safetensors.index.json']
        folder = Path(snapshot_download(name, allow_patterns=patterns, **version))
        if not any((folder / file).is_file() for file in _FILES):
            # Not at once: many models have their weights in both formats.
            others = ['pytorch_model*', 'open_clip_model.safetensors']
            snapshot_download(name, allow_patterns=others, **version)
        return folder


@contextmanager
def _hub_errors(source: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Many classes of errors are raised without a network.
        raise CheckpointError(
            f'{source!r} cannot be downloaded ({first_line(error)}): try again, or give {remedy}'
        ) from error


def _downloaded(url: str) -> Path:
    """The file of a URL in the cache."""
    # Many sites have a file of this name: each URL has a folder.
    folder = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = cache() / folder / (os.path.basename(urlparse(url).path).lstrip('.') or 'weights.pth')
    if not path.is_file():
        download(url, path, problem)
    return path


def _from_timm(source: str) -> Source:
    """The file that timm's hub has under the name of a model and its tag, downloaded if needed."""
    import timm
    from huggingface_hub import hf_hub_download

    name = source.removeprefix(_TIMM)
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
    with _hub_errors(source, remedy):
        file = hf_hub_download(config.hf_hub_id, config.hf_hub_filename or 'model.safetensors')
    return Source(source, (Path(file),), timm_config=config.to_dict())
