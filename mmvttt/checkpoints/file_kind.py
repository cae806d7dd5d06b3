"""Tells a file of weights from what a server has sent instead of it, by its bytes."""

from __future__ import annotations

import json
import os
import re
import zipfile
from typing import IO

SAFETENSORS, ARCHIVE, PICKLE = 'a file of safetensors', 'a file of torch', 'a pickle'
# Beginnings of other files. Comments may come before a page's first tag.
_OTHERS = (
    ('a pointer of Git LFS instead of the file', rb'version https://git-lfs'),
    ('a compressed file of gzip', rb'\x1f\x8b'),
    ('a web page', rb'\s*(<!--.*?-->\s*)*<[!?a-zA-Z]'),
    ('JSON', rb'\s*[\[{]'),
)
_LARGEST_HEADER = 10**8


def kind_of(file: IO[bytes]) -> tuple[str, bool]:
    """The kind of an open file by its bytes, and whether it is one of weights."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(4096)
    file.seek(0)
    if not start:
        return 'empty', False
    length = int.from_bytes(start[:8], 'little')
    if start[8:9] == b'{' and length <= min(size, _LARGEST_HEADER):
        return SAFETENSORS, True
    if start[:2] == b'PK':
        names = _names(file)
        if names is None:
            return 'damaged, an archive that is cut off', False
        if any(name.rpartition('/')[2] == 'data.pkl' for name in names):
            return ARCHIVE, True
        return 'an archive without the data of torch', False
    if start[:1] == b'\x80':
        return PICKLE, True
    start = start.removeprefix(b'\xef\xbb\xbf')
    others = (kind for kind, first in _OTHERS if re.match(first, start, re.DOTALL))
    return next(others, 'not a file of torch or safetensors'), False


def _names(file: IO[bytes]) -> list[str] | None:
    """The names of a zip archive's members, or None if the archive cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, ValueError):
        return None
    finally:
        file.seek(0)


def problem(path: str | os.PathLike[str]) -> str | None:
    """Why a file, as it was downloaded, is none of weights or is damaged; None if it is whole.

    Without torch: a pickle is recognised only, and read later.
    """
    with open(path, 'rb') as file:
        kind, good = kind_of(file)
        if not good:
            return f'is {kind}'
        if kind == ARCHIVE:
            return archive_problem(file)
        cut_off = kind == SAFETENSORS and _is_cut_off(file)
        return f'is {kind} that is cut off or damaged' if cut_off else None


def archive_problem(file: IO[bytes]) -> str | None:
    """Compares the checksums of an archive's parts, and their sizes with the file's.

    torch would decompress parts of any size, and read overlapping parts.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(p.compress_type != zipfile.ZIP_STORED for p in parts):
            return 'has compressed parts, as TorchScript has and torch.save never writes'
        if sum(p.file_size for p in parts) > size:
            return 'is an archive whose parts lie on one another'
        if damaged := archive.testzip():
            return f'is damaged: the checksum of its part {damaged!r} is wrong'
    return None


def _is_cut_off(file: IO[bytes]) -> bool:
    """Whether a safetensors file ends elsewhere than its header says."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), 'little')
    try:
        tensors = json.loads(file.read(length))
        ends = [v['data_offsets'][1] for k, v in tensors.items() if k != '__metadata__']
        return 8 + length + max(ends, default=0) != size
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True
