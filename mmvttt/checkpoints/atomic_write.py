"""Files that a kill or a full disk in the middle of writing cannot damage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# `.epoch_3.pth.1234.partial`: hidden, so that no pattern for checkpoints finds it.
PARTIAL = '.partial'


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields another name in the folder of a file, for a writer that takes a path.

    The file of that name goes to the disk and takes the place of `path` when the block ends, so
    that `path` holds the old content or all of the new at any moment. After an error it is removed
    and `path` is as it was. A link is replaced, not followed: its target may be the file of another
    program. The folder is made if missing.

    Args:
        path: The file to write or to replace.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f'.{target.name}.{os.getpid()}{PARTIAL}')
    try:
        yield partial
        with open(partial, 'rb+') as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if os.name == 'posix':
        # The new name is an entry of the folder, which has to reach the disk too.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file such that its name holds the old content or all of the new, see `replacing`."""
    with replacing(path) as partial:
        partial.write_bytes(data)
