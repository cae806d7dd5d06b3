"""Files that a kill in the middle of writing cannot damage: mmengine's local backend, patched."""

from __future__ import annotations

from pathlib import Path

from mmengine.fileio import LocalBackend

from ..checkpoints.atomic_write import write_whole
from .patch import patch, replace


@patch('whole-files', 'a kill while mmengine writes a checkpoint leaves half a file by its name')
def write_whole_files() -> str | None:
    """Makes mmengine's local backend, through which checkpoints go, write by `write_whole`."""

    def put(self: LocalBackend, obj: bytes, filepath: str | Path) -> None:
        write_whole(filepath, obj)

    def put_text(
        self: LocalBackend, obj: str, filepath: str | Path, encoding: str = 'utf-8'
    ) -> None:
        write_whole(filepath, obj.encode(encoding))

    replace(LocalBackend, 'put', put)
    replace(LocalBackend, 'put_text', put_text)
    return None
