"""Rows of an array in a file, read one at a time."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from mmvttt.errors import DataError


class ArrayRows:
    """The rows of a plain `.npy` file of numbers.

    A file that is truncated while it is read is an error here; a memory map would kill the process.

    Args:
        path: The file.

    Raises:
        DataError: It is not a file, has no array of numbers with rows, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A FIFO without a writer would block.
            self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 'rb', buffering=0)
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError('no regular file')
            version = np.lib.format.read_magic(self._file)
            read_header: Any = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read_header is None:
                raise ValueError(f'version {version} of the format')
            self.shape, columns_first, self.dtype = read_header(self._file)
        except (OSError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise self._damaged(f'{type(error).__name__}: {error}') from error
        numbers = self.dtype.kind in 'biufc' and self.dtype.itemsize <= 8
        if not numbers or not self.shape or min(self.shape) < 0:
            raise self._damaged(f'shape {self.shape} of {self.dtype}')
        if columns_first and len(self.shape) > 1:
            raise self._damaged('its columns come first, save it with order C')
        self._start = self._file.tell()
        self._row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if status.st_size < self._start + len(self) * self._row:
            raise self._damaged(f'it is shorter than {self.shape} of {self.dtype}')

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> np.ndarray:
        """Row `index`, a copy."""
        if not -len(self) <= index < len(self):
            raise IndexError(f'{self.path.name} has {len(self)} rows, got index {index}')
        start = self._start + index % len(self) * self._row
        content = bytearray(self._row)
        if os.preadv(self._file.fileno(), [content], start) != self._row:
            raise self._damaged('it has become shorter')
        row = np.frombuffer(content, self.dtype).reshape(self.shape[1:])
        # PyTorch takes only the machine's own byte order.
        return row.astype(self.dtype.newbyteorder('='), copy=False)

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f'{os.fspath(self.path)!r} is not what a cache of latents holds ({what}): make it again'
        )
