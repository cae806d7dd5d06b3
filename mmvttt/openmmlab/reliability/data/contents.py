"""Digests of data: the same contents have the same digest in another folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .images import spread

# Bytes of a picture; of both ends of an annotation file.
_FIRST, _PART = 4096, 32 * 2**20
# Pictures that are opened.
_OPENED = 64


def file_digest(path: str | os.PathLike[str]) -> str:
    """A digest of a file's size and of its first and last 32 MiB."""
    size = os.path.getsize(path)
    with open(path, 'rb') as file:
        digest = hashlib.sha256(f'{size} '.encode() + file.read(_PART))
        file.seek(max(_PART, size - _PART))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def dataset_digest(dataset: Any) -> str | None:
    """A digest of a built data set, or a wrapper of some: 64 samples, and the annotation file.

    Samples count with their labels, and their files with their names and first 4 KiB. None if the
    data set does not describe its samples.
    """
    if not hasattr(dataset, 'get_data_info'):
        inner = getattr(dataset, 'dataset', None)
        return None if inner is None else dataset_digest(inner)
    digest = hashlib.sha256()
    for index in spread(list(range(len(dataset))), _OPENED):
        _add(digest, dataset.get_data_info(index))
    for path in _annotation_files(dataset):
        if isinstance(path, str) and os.path.isfile(path):
            digest.update(file_digest(path).encode())
    return digest.hexdigest()[:16]


def _annotation_files(dataset: Any) -> Iterator[Any]:
    """The annotation file, or None, of each data set inside of wrappers."""
    inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None)
    for part in inner if isinstance(inner, list) else [inner]:
        if part is None:
            yield getattr(dataset, 'ann_file', None)
        else:
            yield from _annotation_files(part)


def _add(digest: Any, value: Any, key: str = '') -> None:
    """Adds a part of a sample."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            # Its position in the data may be another one.
            if name != 'sample_idx':
                _add(digest, value[name], str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item, key)
    elif (isinstance(value, str) and os.path.isabs(value)) or key.endswith('_path'):
        digest.update(f'{key} {os.path.basename(str(value))}'.encode())
        if isinstance(value, str) and os.path.isfile(value):
            with open(value, 'rb') as file:
                digest.update(file.read(_FIRST))
    elif isinstance(value, np.ndarray):
        digest.update(f'{key} {value.dtype} {value.shape}'.encode() + value.tobytes())
    elif ' at 0x' not in (text := repr(value)):
        digest.update(f'{key} {text}'.encode())
