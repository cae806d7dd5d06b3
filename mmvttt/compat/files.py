"""Files that a kill in the middle of writing cannot damage: mmengine's local backend, patched."""

from __future__ import annotations

import logging
from functools import wraps
from pathlib import Path
from typing import Any

from mmengine.fileio import LocalBackend
from mmengine.logging import print_log
from mmengine.visualization import LocalVisBackend

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


@patch('full-disk', 'a full disk ends a training, by a line of the curves that cannot be written')
def log_without_room() -> str | None:
    """Makes mmengine's local curves say what cannot be written, and go on."""
    original = LocalVisBackend._dump

    @wraps(original)
    def dump(self: LocalVisBackend, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except OSError as error:
            print_log(f'the curves cannot be written: {error}', 'current', logging.WARNING)

    replace(LocalVisBackend, '_dump', dump)
    return None
