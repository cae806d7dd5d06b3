"""Atomic writes: a kill or a full disk while writing does not damage a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage

# `.epoch_3.pth.1234.partial`: hidden, so that no pattern for checkpoints finds it.
PARTIAL = '.partial'
# Windows has no such flag.
NOFOLLOW = getattr(os, 'O_NOFOLLOW', 0)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary name in the file's folder, for a writer that takes a path.

    At the end of the block the file is flushed to disk and renamed to `path`, which always has
    either the old or the whole new content. After an error it is removed. A link is replaced, not
    followed: its target may belong to another program. A missing folder is created. A full disk
    is an OSError with `errno.ENOSPC`, whatever the writer raises.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f'.{target.name}.{os.getpid()}{PARTIAL}')
    # A file of this name is a leftover, or a link planted to have its target overwritten.
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o666))
    try:
        yield partial
        with open(partial, 'rb+') as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        # torch reports a full disk as "unexpected pos".
        full = isinstance(error, Exception) and not disk_usage(target.parent).free
        partial.unlink(missing_ok=True)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(target)) from error
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = os.fspath(target)
        raise
    if os.name == 'posix':
        # The new name is an entry of the folder, which must be flushed too.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file atomically, see `replacing`."""
    with replacing(path) as partial, open(os.open(partial, os.O_WRONLY | NOFOLLOW), 'wb') as file:
        file.write(data)
