"""Lock on a work directory: a second training would overwrite the first one's files."""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from mmengine.dist import all_gather_object, is_main_process
from mmengine.logging import print_log

from mmvttt.errors import UsageError
from mmvttt.outputs import check_new_folder

# The file of the lock, and the one that tells who holds it: filelock empties its own.
_LOCK, _HOLDER = '.lock', '.lock_holder'
# Data workers of a killed training may hold its lock until they end (`signals.py`).
_SECONDS = 3.0
# Errors of disks without locks, such as an NFS without its lock daemon.
_WITHOUT_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP


class RunLock:
    """Lock of rank 0 on a folder, which the system releases when the process ends in any way.

    Its files stay in the folder. A folder on a disk without locks is not locked, with a warning.

    Raises:
        UsageError: On all ranks: another process holds it, which the error names, or the folder
            cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._lock: FileLock | None = None
        path = Path(folder).absolute()
        # Folders that are made here, the inner ones first.
        self._made = [p for p in (path, *path.parents) if not p.exists()]
        problem = ''
        try:
            check_new_folder(folder)
            os.makedirs(folder, exist_ok=True)
            if is_main_process():
                self._lock = _locked(Path(folder))
        except (OSError, UsageError) as error:
            problem = str(error)
        message = next(filter(None, all_gather_object(problem)), None)
        if message:
            self.release()
            raise UsageError(message)

    def release(self) -> None:
        """Releases the lock, and all other locks of this process on the folder."""
        if self._lock is not None:
            self._lock.release(force=True)

    def undo(self) -> None:
        """Releases the lock of a training that was refused, and removes the folders made for it."""
        self.release()
        if self._lock is None or not self._made:
            return
        for name in (_LOCK, _HOLDER):
            (self._made[0] / name).unlink(missing_ok=True)
        with suppress(OSError):
            # Another program may have written there.
            for folder in self._made:
                folder.rmdir()


def _locked(folder: Path) -> FileLock:
    for path in (folder / _LOCK, folder / _HOLDER):
        if path.is_symlink():
            # The target belongs to another program.
            path.unlink()
    # One object for all locks of this process: it may prepare a training twice.
    lock = FileLock(folder.resolve() / _LOCK, is_singleton=True, thread_local=False)
    try:
        lock.acquire(timeout=_SECONDS)
    except Timeout:
        holder = folder / _HOLDER
        name = holder.read_text(errors='replace')[:200] if holder.is_file() else ''
        raise UsageError(
            f'another training is writing to {str(folder)!r}: '
            f'{name or "one that has just begun"}; give this one another --work-dir, or end the '
            'other first'
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        text = f'{str(folder)!r} cannot be locked ({error.strerror}): start one training in it'
        print_log(text, 'current', logging.WARNING)
    (folder / _HOLDER).write_text(f'process {os.getpid()} on {socket.gethostname()}')
    return lock
