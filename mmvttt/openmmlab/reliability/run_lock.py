"""Lock on a work directory: a second training would overwrite the first one's files."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.dist import all_gather_object, is_main_process

from mmvttt.errors import UsageError
from mmvttt.outputs import check_new_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = '.running'


class RunLock:
    """Lock on a folder, which the system releases when the process ends in any way.

    Forked data workers do not inherit it. The lock file names the process that holds it, the error
    the `option` of the command line that gives another folder.
    """

    def __init__(self, folder: str | os.PathLike[str], option: str = '--work-dir') -> None:
        self.option = option
        self.path = Path(folder, _NAME)
        self._file: int | None = None

    def acquire(self, check: Callable[[], None] = lambda: None) -> None:
        """Takes the lock on rank 0, where the system and the disk have locks, and calls `check`.

        Its UsageError, or that another process has the lock, is raised on all ranks.
        """
        with _raised_on_all_ranks():
            if not is_main_process():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink():
                # The target belongs to another program.
                self.path.unlink()
            self._file = _locked(self.path, os.O_CREAT, self.option)
            if self._file is not None:
                os.truncate(self._file, 0)
                os.write(self._file, f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
            check()

    def release(self) -> None:
        """Releases the lock, and all other locks of this process on the folder."""
        if self._file is not None:
            if _is_at(self._file, self.path):
                self.path.unlink()
            os.close(self._file)
            self._file = None


def _locked(path: Path, flags: int = 0, option: str = '--work-dir') -> int | None:
    """A locked file; None if the system or the disk has no locks."""
    if fcntl is None:
        return None
    try:
        # A pipe would wait for a reader.
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(None, 'not a regular file')
    except OSError as error:
        raise UsageError(
            f'{str(path)!r} marks a folder in which a training runs, and cannot be used '
            f'({error.strerror}): remove it, or give another {option}'
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if flags & os.O_CREAT and not _is_at(file, path):
            # Its holder has removed the file since it was opened.
            os.close(file)
            return _locked(path, flags, option)
        return file
    except OSError as error:
        holder = os.read(file, 200).decode(errors='replace').strip()
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise UsageError(
                f'another training is writing to {str(path.parent)!r}: '
                f'{holder or "one that has just begun"}; give this one another {option}, or '
                'end the other first'
            ) from None
    return None


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def require_free(folder: str | os.PathLike[str]) -> None:
    """Creates a folder if missing; a UsageError on all ranks if a training cannot write to it."""
    with _raised_on_all_ranks():
        check_new_folder(folder)
        os.makedirs(folder, exist_ok=True)
        pointer = Path(folder, 'last_checkpoint')
        if pointer.exists() and not pointer.is_file():
            raise UsageError(
                f'{str(pointer)!r} is not a regular file, and a training writes the name of its '
                'last checkpoint there: remove it, or give another --work-dir'
            )
        path = Path(folder, _NAME)
        if is_main_process() and path.exists() and not path.is_symlink():
            file = _locked(path)
            if file is not None:
                os.close(file)


@contextmanager
def _raised_on_all_ranks() -> Iterator[None]:
    problem = ''
    try:
        yield
    except (OSError, UsageError) as error:
        problem = str(error)
    message = next(filter(None, all_gather_object(problem)), None)
    if message:
        raise UsageError(message)
