"""A disk that is full as long as the file `full` is in the current directory."""

import errno
import os
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

_fsync = os.fsync


def _fsync_if_there_is_room(file: int) -> None:
    if Path('full').exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _fsync(file)


@HOOKS.register_module(force=True)
class FullDisk(Hook):
    """Puts the disk under the control of the test."""

    def before_train(self, runner: object) -> None:
        os.fsync = _fsync_if_there_is_room
