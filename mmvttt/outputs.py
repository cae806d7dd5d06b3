"""Checks that results can be written, before the work that makes them."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from .errors import UsageError


def check_new_file(path: str | os.PathLike[str]) -> None:
    """Raises a UsageError if a file cannot be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f'{os.fspath(path)!r} is not a file: give the name of a new one')
    check_new_folder(os.path.dirname(path))


def check_new_folder(path: str | os.PathLike[str]) -> None:
    """Raises a UsageError if files cannot be written into a folder, which may be missing."""
    folder = Path(path).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # Nothing else is certain: root is granted every permission, also where nothing can be made.
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f'nothing can be written to {str(folder)!r} ({error.strerror}): give another path'
        ) from error
