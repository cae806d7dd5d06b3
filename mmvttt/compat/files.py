"""Files that a kill in the middle of writing cannot damage: mmengine's local backend, mended."""

from __future__ import annotations

import os
from pathlib import Path

from mmengine.fileio import LocalBackend

from .mend import mend

# `.epoch_3.pth.1234.partial`: hidden, so that no pattern for checkpoints finds it.
PARTIAL = '.partial'


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file such that its name holds the old content or all of the new, at any moment.

    The data goes to another file of the same folder, and to the disk, before it gets the name.
    """
    target = Path(os.path.realpath(path))
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


@mend('whole-files', 'a kill while mmengine writes a checkpoint leaves half a file by its name')
def write_whole_files() -> str | None:
    """Makes mmengine's local backend, through which checkpoints go, write by `write_whole`."""

    def put(self: LocalBackend, obj: bytes, filepath: str | Path) -> None:
        write_whole(filepath, obj)

    def put_text(
        self: LocalBackend, obj: str, filepath: str | Path, encoding: str = 'utf-8'
    ) -> None:
        write_whole(filepath, obj.encode(encoding))

    LocalBackend.put, LocalBackend.put_text = put, put_text
    return None
