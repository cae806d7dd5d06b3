"""Locks on files among processes, which the system releases when a process ends in any way."""

from __future__ import annotations

import errno
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_log = logging.getLogger(__name__)
# Seconds after which a wait is logged.
_PATIENCE = 5.0
# Errors of disks without locks, such as an NFS without its lock daemon, or Lustre without flock.
_WITHOUT_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS


def locked(path: str | os.PathLike[str], timeout: float = -1, **options: Any) -> FileLock:
    """Waits for a lock, for `release()`. On a disk without locks there is none, with a warning.

    A wait of seconds is logged. On such a disk filelock would leave a marker, which outlives a
    killed process.

    Args:
        path: The file that is locked.
        timeout: Seconds to wait; below 0: for ever.
        options: Those of filelock's `FileLock`.

    Raises:
        filelock.Timeout: Another process holds the lock.
        OSError: The file cannot be made.
    """
    lock = FileLock(path, fallback_to_soft=False, **options)
    try:
        try:
            lock.acquire(timeout if timeout >= 0 else _PATIENCE)
        except Timeout:
            if timeout >= 0:
                raise
            _log.warning('waiting for another process, which holds %s', path)
            lock.acquire()
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        warnings.warn(
            f'{os.fspath(Path(path).parent)!r} cannot be locked ({error.strerror}): let one '
            'process at a time write there',
            stacklevel=2,
        )
    return lock
