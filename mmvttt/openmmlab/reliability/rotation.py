"""Removes checkpoints that newer ones replace, and never another program's file."""

from __future__ import annotations

import os
import re
from typing import Any

from mmengine.dist import is_main_process
from mmengine.logging import MessageHub

# Entries of the message hub, which checkpoints keep.
_LAST, _KEPT = 'last_ckpt', 'keep_ckpt_ids'
_PREEMPTED, _OUTDATED = 'preempted_checkpoint', 'outdated_checkpoints'
# File names of this hook and mmengine's. Nothing else is ever removed.
_OURS = re.compile(r'(best_[^/\\]+|(epoch|iter)_\d+)\.pth')


class Rotation:
    """Keeps track of a run's checkpoints in the message hub, so that a resumed run continues.

    A replaced checkpoint is marked first, and removed after the next one is written. The file names
    of regular checkpoints follow `template`. `keep` of them stay, all if it is 0 or less.
    """

    def __init__(self, hub: MessageHub, folder: str, template: str, keep: int) -> None:
        self.hub, self.folder, self.template, self.keep = hub, folder, template, keep

    def drop_foreign_names(self) -> None:
        """Maps the entries of a resumed checkpoint to file names of this run, or drops them.

        These files will be removed, and a crafted checkpoint could name others.
        """
        info = self.hub.runtime_info
        named = [k for k in info if k.startswith('best_ckpt') or k in (_LAST, _PREEMPTED)]
        for key in filter(info.get, named):
            name = re.split(r'[/\\]', str(info[key]))[-1]
            if _OURS.fullmatch(name):
                info[key] = os.path.join(self.folder, name)
            else:
                del info[key]
        for key, kind in ((_KEPT, int), (_OUTDATED, str)):
            if key in info:
                items = info[key] if isinstance(info[key], list) else []
                info[key] = [i for i in items if isinstance(i, kind)]
        # mmengine would remove entries beyond the limit, including folders of any kind.
        self._keep(info.get(_KEPT, []))

    def regular(self, step: int) -> None:
        """Notes a regular checkpoint that is about to be written."""
        info = self.hub.runtime_info
        self._keep([*(before for before in info.get(_KEPT, []) if before != step), step])
        # mmengine warns of entries that a resume does not find.
        if _PREEMPTED in info:
            self.replace(info[_PREEMPTED])
            info[_PREEMPTED] = ''

    def preempt(self, name: str) -> None:
        """Notes a checkpoint between two regular ones that is about to be written."""
        self.replace(self.hub.runtime_info.get(_PREEMPTED, ''))
        self.hub.update_info(_PREEMPTED, os.path.join(self.folder, name))

    def replace(self, *paths: str) -> None:
        """Notes checkpoints to be removed when the next one has been written."""
        names = [name for name in map(os.path.basename, paths) if name]
        self.hub.update_info(_OUTDATED, [*self.hub.runtime_info.get(_OUTDATED, []), *names])

    def remove_replaced(self, backend: Any, current: Any) -> None:
        """Removes replaced checkpoints of this run, by the folder's backend, except the current."""
        names = self.hub.runtime_info.pop(_OUTDATED, [])
        for name in {*names} - {os.path.basename(str(current))}:
            path = backend.join_path(self.folder, name)
            if is_main_process() and self._is_ours(name) and backend.isfile(path):
                backend.remove(path)

    def _keep(self, steps: list[int]) -> None:
        if self.keep > 0:
            self.replace(*map(self.template.format, steps[: -self.keep]))
            self.hub.update_info(_KEPT, steps[-self.keep :])

    def _is_ours(self, name: str) -> bool:
        # The number may have a format, as in 'epoch_{:03d}.pth'.
        parts = re.split(r'{[^}]*}', self.template)
        regular = r'\d+'.join(map(re.escape, parts))
        return bool(_OURS.fullmatch(name) or re.fullmatch(regular, name))
