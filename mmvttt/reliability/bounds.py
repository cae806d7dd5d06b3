"""What a file would make of itself when it is read, counted before anything is built.

torch's weights-only reader runs no code, but it believes a file's sizes: a few hundred bytes may
ask for gigabytes, or for tuples in tuples that are too deep for Python to hash. Here the
instructions of the pickle are followed with the sizes of the values in the place of the values.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

# Python hashes and compares nested tuples by recursion; checkpoints nest to a dozen.
_DEEPEST = 100
# Tensors may share numbers (tied weights), and expanded ones repeat them, in bounds.
_SHARED, _SMALL = 8, 2**20
_ZIP = b'PK\x03\x04'
_TYPES = {
    'Double': 8, 'Long': 8, 'ComplexFloat': 8, 'ComplexDouble': 16, 'Float': 4, 'Int': 4,
    'Half': 2, 'BFloat16': 2, 'Short': 2,
}  # fmt: skip
# What torch's list has, and makes as much memory as its argument says.
_GREEDY = ('bytearray', 'UntypedStorage', 'TypedStorage', '_rebuild_qtensor')
# Instructions that put what they take into the first thing that they take.
_FILLS = ('APPEND', 'APPENDS', 'SETITEM', 'SETITEMS', 'ADDITEMS', 'BUILD')


class TooMuchError(ValueError):
    """A file asks for more than it can hold."""


@dataclass
class _Value:
    """What stands for a value: its nesting, its parts with all repetitions, and what is known."""

    depth: int = 0
    parts: int = 1
    known: Any = None


class _Storage(NamedTuple):
    itemsize: int


def check_bounds(file: IO[bytes]) -> None:
    """Follows what torch would read, in either of its formats; leaves the file at its start.

    Args:
        file: Open for reading; can seek.

    Raises:
        TooMuchError: Says what, as a predicate of the file.
        Exception: What `zipfile` and `pickletools` raise where the file is no checkpoint.
    """
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(len(_ZIP))
    file.seek(0)
    if start == _ZIP:
        with zipfile.ZipFile(file) as archive:
            _check_archive(archive, size)
    else:
        # Before torch 1.6: a number, a version, the machine, the content, names of the storages.
        for _ in range(5):
            if not _Walk(size, None).follow(file):
                break
    file.seek(0)


def _check_archive(archive: zipfile.ZipFile, size: int) -> None:
    parts = archive.infolist()
    if any(p.compress_type != zipfile.ZIP_STORED or p.file_size != p.compress_size for p in parts):
        raise TooMuchError('has compressed parts, as TorchScript has and torch.save never writes')
    if sum(p.file_size for p in parts) > size:
        raise TooMuchError('is an archive whose parts lie on one another')
    damaged = archive.testzip()
    if damaged is not None:
        raise TooMuchError(f'is damaged: the checksum of its part {damaged!r} is wrong')
    storages = {
        p.filename.rpartition('/data/')[2]: p.file_size for p in parts if '/data/' in p.filename
    }
    for part in parts:
        if part.filename.rpartition('/')[2] == 'data.pkl':
            with archive.open(part) as file:
                _Walk(size, storages).follow(file)


class _Walk:
    """The machine of a pickle, with `_Value` for values.

    Args:
        size: Bytes of the file.
        storages: Bytes of each storage by its name, where they are parts of an archive.
    """

    def __init__(self, size: int, storages: Mapping[str, int] | None) -> None:
        self.size, self.storages = size, storages
        self.stack: list[_Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Value] = {}
        self.seen: set[Any] = set()
        self.stored = self.tensors = 0

    def follow(self, file: IO[bytes]) -> bool:
        """One pickle; whether it is one of a checkpoint's, after which there may be others."""
        arg: Any
        for op, arg, _ in pickletools.genops(file):
            name = op.name
            if 'PUT' in name or name == 'MEMOIZE':
                self.memo[len(self.memo) if arg is None else arg] = self.stack[-1]
            elif 'GET' in name:
                self.stack.append(self.memo[arg])
            elif name == 'MARK':
                self.marks.append(len(self.stack))
            elif name == 'STOP':
                return True
            else:
                self._step(op, arg)
        return False

    def _step(self, op: pickletools.OpcodeInfo, arg: Any) -> None:
        name = op.name
        taken = self._take(op)
        if not op.stack_after:
            return
        parts = 1 + sum(v.parts for v in taken)
        if name in _FILLS:
            # The same value as before, which may lie in the memo too.
            value, *rest = taken
            value.depth = max([value.depth, *(1 + v.depth for v in rest)])
            value.parts = parts
        else:
            value = _Value(max([0, *(1 + v.depth for v in taken)]), parts)
        self.stack.append(value)
        if value.depth > _DEEPEST:
            raise TooMuchError(f'nests values more than {_DEEPEST} deep')
        if parts > _SHARED * self.size + _SMALL:
            raise TooMuchError('repeats its values more often than a checkpoint does')
        if 'TUPLE' in name:
            value.known = tuple(v.known for v in taken)
        elif name in ('GLOBAL', 'STACK_GLOBAL'):
            value.known = str(arg or taken[-1].known).replace(' ', '.').rpartition('.')[2]
        elif name == 'BINPERSID':
            value.known = self._storage(taken[0].known)
        elif name in ('REDUCE', 'NEWOBJ'):
            value.known = self._call(taken[0].known, taken[1].known)
        elif not taken:
            value.known = arg

    def _take(self, op: pickletools.OpcodeInfo) -> list[_Value]:
        first = len(self.stack) - len(op.stack_before)
        if pickletools.markobject in op.stack_before:
            # What lies below the mark is taken too by instructions that fill a container.
            first = self.marks.pop() - op.stack_before.index(pickletools.markobject)
        taken, self.stack[first:] = self.stack[first:], []
        return taken

    def _storage(self, name: Any) -> _Storage | None:
        """Counts a storage, which a file may name as often as it likes."""
        match name:
            case (_, kind, key, _, int() as numel, *_):
                itemsize = _TYPES.get(str(kind).removesuffix('Storage'), 1)
                there = self.size if self.storages is None else self.storages.get(str(key), 0)
                if key not in self.seen:
                    self.seen.add(key)
                    self.stored += numel * itemsize
                if not 0 <= numel * itemsize <= there or self.stored > self.size:
                    raise TooMuchError(f'says that {key!r} has {numel} numbers: it has fewer')
                return _Storage(itemsize)
        return None

    def _call(self, function: Any, args: Any) -> Any:
        if function == '_rebuild_from_type_v2' and isinstance(args, tuple) and args:
            self._call(args[0], args[2] if len(args) > 2 else None)
            return None
        if function in _GREEDY or str(function).endswith('Tensor'):
            raise TooMuchError(f'asks for a {function}, which no checkpoint needs')
        if function in ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_tensor_v3'):
            match args:
                case (_Storage() as storage, _, tuple() as shape, *_) if all(
                    isinstance(n, int) and n >= 0 for n in shape
                ):
                    self.tensors += storage.itemsize * math.prod(shape)
                    if self.tensors > _SHARED * self.size + _SMALL:
                        raise TooMuchError(f'has tensors of many times its size, such as {shape}')
        # What `torch.Size` and the like are given is what they are, as far as sizes go.
        return args[0] if isinstance(args, tuple) and len(args) == 1 else None
