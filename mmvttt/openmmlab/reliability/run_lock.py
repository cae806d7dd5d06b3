"""Lock on a work directory: a second training would overwrite the first one's files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import IO

from mmengine.dist import all_gather_object, is_main_process

from mmvttt.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = '.lock'


class RunLock:
    """Lock of rank 0 on a folder, which the system releases when the process ends in any way.

    Forked data workers do not inherit it. Its file stays in the folder.

    Raises:
        UsageError: On all ranks: another process holds it, which the error names, or the folder
            cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file: IO[str] | None = None
        problem = ''
        try:
            os.makedirs(folder, exist_ok=True)
            if is_main_process():
                self._file = _locked(Path(folder, _NAME))
        except UsageError as error:
            problem = str(error)
        except OSError as error:
            problem = (
                f'nothing can be written to {os.fspath(folder)!r} ({error.strerror}): give another '
                '--work-dir'
            )
        message = next(filter(None, all_gather_object(problem)), None)
        if message:
            self.release()
            raise UsageError(message)

    def release(self) -> None:
        """Releases the lock, and all other locks of this process on the folder."""
        if self._file is not None:
            self._file.close()


def _locked(path: Path) -> IO[str]:
    if path.is_symlink():
        # The target belongs to another program.
        path.unlink()
    file = open(path, 'a+', encoding='utf-8')  # noqa: SIM115
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip()
        file.close()
        raise UsageError(
            f'another training is writing to {str(path.parent)!r}: '
            f'{holder or "one that has just begun"}; give this one another --work-dir, or end the '
            'other first'
        ) from None
    except OSError:
        # A disk without locks.
        pass
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}')
    file.flush()
    return file
