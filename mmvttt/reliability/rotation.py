"""Checkpoints that newer ones replace: which, when, and never the file of another program."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmengine.dist import is_main_process
from mmengine.logging import MessageHub

# Entries of the message hub, which checkpoints keep.
_LAST, _KEPT = 'last_ckpt', 'keep_ckpt_ids'
_PREEMPTED, _OUTDATED = 'preempted_checkpoint', 'outdated_checkpoints'
# File names of this hook and mmengine's. Nothing else is ever removed.
_OURS = re.compile(r'(best_[^/\\]+|(epoch|iter)_\d+)\.pth')


@dataclass
class Turn:
    """A regular checkpoint that is about to be written, and the paths or names that it replaces."""

    outdated: list[str]
    written: bool = False


class Rotation:
    """Bookkeeping of a run's checkpoints in the message hub, so that a resumed run continues it.

    Args:
        hub: Message hub of the run.
        folder: Folder of the checkpoints.
        template: Name of a regular checkpoint, with `{}` for its epoch or step.
        keep: Number of regular checkpoints to keep; 0 or less: all.
    """

    def __init__(self, hub: MessageHub, folder: str, template: str, keep: int) -> None:
        self.hub, self.folder, self.template, self.keep = hub, folder, template, keep

    @property
    def outdated(self) -> list[str]:
        """Names that the latest checkpoint has replaced; a kill may have left them."""
        return self.hub.runtime_info.get(_OUTDATED, [])

    def drop_foreign_names(self) -> None:
        """Makes the entries of a resumed checkpoint names of files of this run, or drops them.

        They are removed when better or newer checkpoints come: a crafted one would name others.
        """
        info = self.hub.runtime_info
        for key in [k for k in info if k.startswith('best_ckpt') or k in (_LAST, _PREEMPTED)]:
            name = re.split(r'[/\\]', str(info[key]))[-1]
            if _OURS.fullmatch(name):
                info[key] = os.path.join(self.folder, name)
            else:
                del info[key]
        for key, kind in ((_KEPT, int), (_OUTDATED, str)):
            if key in info:
                found = info[key] if isinstance(info[key], list) else []
                info[key] = [i for i in found if isinstance(i, kind)]
        kept = info.get(_KEPT, [])
        if self.keep > 0 and len(kept) > self.keep:
            # mmengine would remove them, folders of any kind included.
            extra = [self.template.format(i) for i in kept[: -self.keep]]
            info[_OUTDATED] = [*self.outdated, *extra]
            info[_KEPT] = kept[-self.keep :]

    @contextmanager
    def turn(self, step: int) -> Iterator[Turn]:
        """Around the writing of a regular checkpoint; taken back where it was not written."""
        info = self.hub.runtime_info
        former = dict(info)
        turn = Turn([info.pop(_PREEMPTED)] if _PREEMPTED in info else [])
        if self.keep > 0:
            kept = list(info.get(_KEPT, []))
            if step not in kept[-1:]:
                kept.append(step)
            turn.outdated += [self.template.format(i) for i in kept[: -self.keep]]
            self.hub.update_info(_KEPT, kept[-self.keep :])
        try:
            yield turn
        finally:
            if not turn.written:
                info.clear()
                info.update(former)

    def preempt(self, name: str) -> list[str]:
        """Notes a checkpoint between two regular ones; returns the one before it."""
        before = self.hub.runtime_info.get(_PREEMPTED)
        self.hub.update_info(_PREEMPTED, os.path.join(self.folder, name))
        return [before] if before else []

    def announce(self, path: str, outdated: Iterable[str]) -> list[str]:
        """Notes a checkpoint that is about to be written, and the names that it replaces."""
        name = os.path.basename(path)
        names = [n for n in map(os.path.basename, outdated) if n and n != name]
        self.hub.update_info(_LAST, path)
        self.hub.update_info(_OUTDATED, names)
        return names

    def remove(self, names: Iterable[str], backend: Any, current: Any) -> None:
        """Removes checkpoints of this run, if they are plain files.

        Args:
            names: In the folder of the checkpoints; those that are not ours stay.
            backend: mmengine's, of the folder.
            current: Path of the latest checkpoint, which stays.
        """
        if not is_main_process():
            return
        for name in names:
            path = backend.join_path(self.folder, name)
            if not self._is_ours(name) or name == os.path.basename(str(current)):
                continue
            if backend.isfile(path):
                backend.remove(path)

    def _is_ours(self, name: str) -> bool:
        before, _, after = self.template.partition('{}')
        own = re.compile(rf'{re.escape(before)}\d+{re.escape(after)}')
        return bool(_OURS.fullmatch(name) or own.fullmatch(name))
