"""Lock on a work directory: a second training would overwrite the first one's files."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from mmengine.config import Config
from mmengine.dist import all_gather_object, is_main_process

from mmvttt.checkpoints.locks import locked
from mmvttt.errors import UsageError
from mmvttt.outputs import check_new_folder

# The file of the lock, and the one that tells who holds it: filelock empties its own.
_LOCK, _HOLDER = '.lock', '.lock_holder'
# Data workers of a killed training may hold its lock until they end (`signals.py`).
_SECONDS = 3.0


def folders_of(cfg: Config) -> list[str]:
    """The folders on this machine that a training writes, the work directory first."""
    hook = (cfg.get('default_hooks') or {}).get('checkpoint')
    out_dir = hook.get('out_dir') if isinstance(hook, dict) else None
    folder = checkpoint_folder(out_dir, cfg.work_dir)
    return [cfg.work_dir, *([] if '://' in folder or folder == cfg.work_dir else [folder])]


def checkpoint_folder(out_dir: str | None, work_dir: str) -> str:
    """The folder into which mmengine's CheckpointHook writes."""
    if not out_dir or out_dir == work_dir:
        return work_dir
    return os.path.join(out_dir, os.path.basename(work_dir.rstrip(os.sep)))


class RunLock:
    """Locks of rank 0 on the folders of a training (see `locked`), whose files stay there.

    Raises:
        UsageError: On all ranks: another process holds one, which the error names, or a folder
            cannot be written.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        self._locks: list[FileLock] = []
        paths = [*map(Path, folders)]
        # Folders that are made here, the inner ones first.
        absolute = [path.absolute() for path in paths]
        self._made = [p for path in absolute for p in (path, *path.parents) if not p.exists()]
        problem = ''
        try:
            for path in paths:
                check_new_folder(path)
                path.mkdir(parents=True, exist_ok=True)
                if is_main_process():
                    self._locks.append(_locked(path))
        except (OSError, UsageError) as error:
            problem = str(error)
        message = next(filter(None, all_gather_object(problem)), None)
        if message:
            self.release()
            raise UsageError(message)

    def release(self) -> None:
        """Releases the locks, and all others of this process on the folders."""
        for lock in self._locks:
            lock.release(force=True)

    def undo(self) -> None:
        """Releases the lock of a training that was refused, and removes the folders made for it."""
        self.release()
        for folder in self._made if self._locks else ():
            for name in (_LOCK, _HOLDER):
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                # Another program may have written there.
                folder.rmdir()


def _locked(folder: Path) -> FileLock:
    for path in (folder / _LOCK, folder / _HOLDER):
        if path.is_symlink():
            # The target belongs to another program.
            path.unlink()
    try:
        # One object for all locks of this process: it may prepare a training twice.
        lock = locked(folder.resolve() / _LOCK, _SECONDS, is_singleton=True, thread_local=False)
    except Timeout:
        holder = folder / _HOLDER
        name = holder.read_text(errors='replace')[:200] if holder.is_file() else ''
        raise UsageError(
            f'another training is writing to {str(folder)!r}: '
            f'{name or "one that has just begun"}; give this one another --work-dir, or end the '
            'other first'
        ) from None
    (folder / _HOLDER).write_text(f'process {os.getpid()} on {socket.gethostname()}')
    return lock
