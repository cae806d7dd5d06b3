"""Stand-ins for the names in a checkpoint: numbers and plain data, no calls.

torch's weights-only reader calls the names on its allow-list with arguments and state from the
file. The originals are not safe for that: `np.ndarray` turns any bytes into Python objects,
`np.dtype` takes its layout from the file, an array's second state frees memory that a tensor may
share, and mmengine's `HistoryBuffer` puts functions into its class. With the first three a crafted
file can access any memory of the process.
"""

from __future__ import annotations

import argparse
import math
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.serialization import get_safe_globals, safe_globals

# One boolean, integer or real number, as `np.dtype.__reduce__` calls it.
_CODES = ('b1', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', 'f2', 'f4', 'f8')
_STATISTICS = ('min', 'max', 'mean', 'current')
# The class of the configurations in the files of ViT³'s authors.
YACS = 'yacs.config.CfgNode'
# torch has one list for the whole process.
_LOCK = threading.RLock()
_HISTORY = 'mmengine.logging.history_buffer.HistoryBuffer'


def _refusal(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f'the checkpoint asks for {what}: docs/safety.md has the list')


def dtype(code: str, align: bool = False, copy: bool = False) -> np.dtype:
    """`np.dtype` in a checkpoint: a type of plain numbers, NumPy's own instance of it.

    NumPy ignores a file's states for its own instances, byte order included.
    """
    if not isinstance(code, str) or code not in _CODES:
        raise _refusal(f'an array of type {code!r}')
    return np.dtype(code)


def _raw(array: Any, kind: Any, size: int) -> bytes:
    """Checks that a file's bytes are `size` numbers of a plain type."""
    if not isinstance(kind, np.dtype) or kind.kind + str(kind.itemsize) not in _CODES:
        raise _refusal(f'numbers of type {kind!r}')
    if not isinstance(array, bytes) or len(array) != size * kind.itemsize:
        raise _refusal(f'an array of {size} numbers with other contents')
    return array


class Array(np.ndarray):
    """`np.ndarray` in a checkpoint: created empty, filled once with plain numbers.

    Behaves like an array, and is pickled as one.
    """

    def __new__(cls, *args: Any) -> Array:
        if args:
            raise _refusal('an array with contents of its own making')
        return super().__new__(cls, 0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        match state:
            case (_, tuple() as shape, kind, bool() as fortran, raw) if not self.size:
                if not all(isinstance(side, int) and side >= 0 for side in shape):
                    raise _refusal(f'an array of shape {shape}')
                whole: Any = (1, shape, kind, fortran, _raw(raw, kind, math.prod(shape)))
                super().__setstate__(whole)
            case _:
                raise _refusal('an unknown state of an array')

    def __array_wrap__(self, array: np.ndarray, *args: Any) -> Any:
        # Results computed from it are ordinary arrays or numbers.
        return array[()]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def reconstruct(kind: type, shape: tuple, code: bytes) -> np.ndarray:
    """NumPy's `_reconstruct` in a checkpoint: an empty array, to be filled by its state."""
    if kind is Array:
        return Array()
    if kind is np.ndarray:
        # A user may have added NumPy's own class to torch's list.
        return np.zeros(0, np.uint8)
    raise _refusal(f'an array of class {kind!r}')


def scalar(kind: np.dtype, raw: bytes) -> np.generic:
    """NumPy's `scalar` in a checkpoint: one number."""
    return np.frombuffer(_raw(raw, kind, 1), kind)[0]


def no_bytes(*contents: Any) -> bytes:
    """`bytes()` in a checkpoint: the contents of an empty array."""
    if contents:
        raise _refusal('bytes made of something else')
    return b''


class LogCurve:
    """mmengine's `HistoryBuffer` in a checkpoint: its numbers, without the functions of the file.

    Attributes:
        values, counts: `(n,)` arrays: logged values, and their weights.
        max_length: Largest number of values.
    """

    values: np.ndarray
    counts: np.ndarray
    max_length: int

    def __init__(self, *args: Any) -> None:
        raise _refusal('a log curve with contents of its own making')

    def __setstate__(self, state: dict[str, Any]) -> None:
        match state:
            case {
                '_log_history': np.ndarray(ndim=1) as values,
                '_count_history': np.ndarray(ndim=1) as counts,
                'max_length': int() as length,
            } if len(values) == len(counts) and length > 0:
                self.values, self.counts, self.max_length = values, counts, length
            case _:
                raise _refusal('an unknown state of a log curve')


def statistic(owner: type, name: str) -> str:
    """`getattr` in a checkpoint: the name of a statistic of a log curve, nothing else."""
    if owner is not LogCurve or name not in _STATISTICS:
        raise _refusal(f'the attribute {name!r} of {owner!r}')
    return name


def allowed() -> list[Any]:
    """The allow-list, in the form of `torch.serialization.add_safe_globals`."""
    cores = ('numpy.core.multiarray', 'numpy._core.multiarray')
    return [
        (LogCurve, _HISTORY),
        (Array, 'numpy.ndarray'),
        (dtype, 'numpy.dtype'),
        (no_bytes, 'builtins.bytes'),
        # NumPy 2 renamed the module; files keep the old name.
        *((reconstruct, f'{core}._reconstruct') for core in cores),
        *((scalar, f'{core}.scalar') for core in cores),
        # Their states may be read, but a file cannot name them, having no dot.
        *((type(np.dtype(code)), code) for code in _CODES),
        # torch translates Python 2's name.
        (statistic, 'builtins.getattr'),
        # Arguments that training scripts save with the weights. A yacs configuration is read as a
        # plain mapping, without yacs; neither is interpreted.
        (argparse.Namespace, 'argparse.Namespace'),
        (OrderedDict, YACS),
    ]


@contextmanager
def allowing() -> Iterator[None]:
    """Adds the allow-list to torch's own, one thread at a time; entries of others stay."""
    with _LOCK:
        others = get_safe_globals()
        with safe_globals([entry for entry in allowed() if entry not in others]):
            yield
