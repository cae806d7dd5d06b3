"""Digests of data: the same contents have the same digest in another folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .images import spread

# Bytes of a file that are read, about a second; of a picture.
_MOST, _PICTURE = 512 * 2**20, 2**20
# Parts of a larger file.
_PARTS = 256
# Samples that count with their labels and sizes of files, and those whose pictures are read.
_SAMPLES, _READ = 1024, 64


def file_digest(path: str | os.PathLike[str], most: int = _MOST) -> str:
    """A digest of a file's size and contents; above `most` bytes, of 256 parts from everywhere."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(f'{size}'.encode())
    parts, length = (1, size) if size <= most else (_PARTS, most // _PARTS)
    with open(path, 'rb') as file:
        for start in np.linspace(0, size - length, parts).astype(int):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()[:16]


def dataset_digest(dataset: Any) -> str | None:
    """A digest of a built data set, or a wrapper of some: samples, and its files.

    1024 samples count with their labels, and the names and sizes of their files, 64 of them also
    with the contents; and the annotation file, or the `files` of a data set without descriptions of
    samples. None if the data set has neither.
    """
    digest = hashlib.sha256()
    if hasattr(dataset, 'get_data_info'):
        indices = spread(list(range(len(dataset))), _SAMPLES)
        read = set(spread(indices, _READ))
        for index in indices:
            _add(digest, dataset.get_data_info(index), read=index in read)
    elif hasattr(dataset, 'files'):
        for path in dataset.files:
            digest.update(f'{os.path.basename(path)} {file_digest(path)}'.encode())
    else:
        parts = list(map(dataset_digest, _inside(dataset)))
        if not parts or None in parts:
            return None
        digest.update(repr(parts).encode())
    for path in _annotation_files(dataset):
        if isinstance(path, str) and os.path.isfile(path):
            digest.update(file_digest(path).encode())
    return digest.hexdigest()[:16]


def _inside(dataset: Any) -> list[Any]:
    """The data sets that a wrapper joins, or the one that it wraps, or none."""
    inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None) or []
    return list(inner) if isinstance(inner, list | tuple) else [inner]


def _annotation_files(dataset: Any) -> Iterator[Any]:
    """The annotation file, or None, of each data set inside of wrappers."""
    inside = _inside(dataset)
    for part in inside:
        yield from _annotation_files(part)
    if not inside:
        yield getattr(dataset, 'ann_file', None)


def _add(digest: Any, value: Any, key: str = '', *, read: bool) -> None:
    """Adds a part of a sample."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            # Its position in the data may be another one.
            if name != 'sample_idx':
                _add(digest, value[name], str(name), read=read)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item, key, read=read)
    elif (isinstance(value, str) and os.path.isabs(value)) or key.endswith('_path'):
        digest.update(f'{key} {os.path.basename(str(value))}'.encode())
        if isinstance(value, str) and os.path.isfile(value):
            contents = file_digest(value, _PICTURE) if read else str(os.path.getsize(value))
            digest.update(contents.encode())
    elif isinstance(value, np.ndarray):
        digest.update(f'{key} {value.dtype} {value.shape}'.encode() + value.tobytes())
    elif ' at 0x' not in (text := repr(value)):
        digest.update(f'{key} {text}'.encode())
