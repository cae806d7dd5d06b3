"""Files that a kill in the middle of writing cannot damage."""

from __future__ import annotations

import os
from pathlib import Path

# `.epoch_3.pth.1234.partial`: hidden, so that no pattern for checkpoints finds it.
PARTIAL = '.partial'


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file such that its name holds the old content or all of the new, at any moment.

    The data goes to another file of the same folder, and to the disk, before it gets the name. A
    link is replaced, not followed: its target may be the file of another program.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f'.{target.name}.{os.getpid()}{PARTIAL}')
    try:
        with open(partial, 'wb') as file:
            file.write(data)
            file.flush()
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
