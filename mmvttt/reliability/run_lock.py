"""One training at a time in a work directory: a second would write over the first one's files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ..errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = '.running'


class RunLock:
    """A lock on a folder, which the system lets go of when the process ends, however it ends.

    Data workers, which are forks, do not inherit it. The file says who holds it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder, _NAME)
        self._file: int | None = None

    def acquire(self) -> None:
        """Takes the lock; nothing happens where the system or the disk has no locks.

        Raises:
            UsageError: Another process has it: which one, on which host.
        """
        if fcntl is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(file, 200).decode(errors='replace').strip()
                os.close(file)
                raise UsageError(
                    f'another training is writing to {str(self.path.parent)!r}: '
                    f'{holder or "one that has just begun"}; give this one another --work-dir, or '
                    'end the other first'
                ) from None
            except OSError:
                os.close(file)
                return
            # Whoever had it may have taken the file away in between.
            if not self.path.exists() or not os.path.samestat(os.fstat(file), self.path.stat()):
                os.close(file)
                continue
            os.truncate(file, 0)
            os.write(file, f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
            self._file = file

    def release(self) -> None:
        """Lets go of it."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Makes a folder, if it is not there, and sees whether files can be written to it.

    Raises:
        UsageError: They cannot.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, 'read-only')
    except OSError as error:
        raise UsageError(
            f'the work directory {os.fspath(folder)!r} cannot be written to ({error.strerror}): '
            'give another --work-dir'
        ) from error
