"""Names the rank that hangs, or whose node is gone, long before a collective gives up."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from mmengine.dist import get_rank, get_world_size, is_distributed
from mmengine.logging import print_log

# Seconds after which a silent rank ends the training; 0: never.
_VARIABLE, _DEFAULT = 'MMVTTT_SILENT_RANK_SECONDS', '900'
_PATIENCE = 30.0
_LEFT = 'left'


class Heartbeat:
    """A thread that writes a number every few seconds, and looks whether the others do.

    A process that is stopped, and a node that is gone, writes none; one that computes does. The
    first two ranks of a node look after all others, the second for the case that the first is
    silent.

    Args:
        store: Store of torch.distributed, which all ranks share.
        rank: This process's.
        ranks: How many there are.
        looks: Whether this rank looks after the others.
        patience: Seconds after which a silent rank is named, again and again; three numbers are
            written in the meantime.
        limit: Seconds after which `give_up` is called; 0: never.
        give_up: Ends the process.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        looks: bool = True,
        patience: float = _PATIENCE,
        limit: float = 0,
        give_up: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.store = dist.PrefixStore('mmvttt_heartbeat', store)
        self.rank, self.ranks, self.looks = rank, ranks, looks
        self.patience, self.limit, self.give_up = patience, limit, give_up
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name='heartbeat', daemon=True)
        # By rank: its number and place, since when, when it was last named.
        self._heard: dict[int, tuple[str, float, float]] = {}

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the others are told that this rank has left."""
        self._end.set()
        self._thread.join(2)

    def _run(self) -> None:
        place = f'{socket.gethostname()!r}, process {os.getpid()}'
        number = 0
        try:
            while not self._end.wait(self.patience / 3 if number else 0):
                self.store.set(str(self.rank), f'{number} {place}')
                number += 1
                if self.looks:
                    self._look(time.monotonic())
            self.store.set(str(self.rank), _LEFT)
        except RuntimeError:
            # The store went with its process: torch reports that.
            return

    def _look(self, now: float) -> None:
        for rank in range(self.ranks):
            key = str(rank)
            beat = self.store.get(key).decode() if self.store.check([key]) else ''
            before, since, named = self._heard.get(rank, (None, now, now))
            if beat != before or beat == _LEFT:
                self._heard[rank] = beat, now, now
            elif now - named >= self.patience:
                self._heard[rank] = beat, since, now
                self._name(rank, beat.partition(' ')[2] or 'it never started', now - since)

    def _name(self, rank: int, place: str, seconds: float) -> None:
        _report(
            f'rank {rank} ({place}) has been silent for {seconds:.0f} s: it is stopped, hangs, or '
            'its node is gone; the others wait for it'
        )
        if self.limit and seconds > self.limit:
            _report(
                f'rank {rank} is given up after {self.limit:.0f} s ({_VARIABLE}): the training '
                'ends; resume from the last checkpoint with --resume'
            )
            self.give_up()


def _report(text: str) -> None:
    # Ranks other than 0 print errors only.
    print_log(text, 'current', logging.ERROR)


def start_heartbeat() -> None:
    """Starts the thread of this process, if it is one of several; it ends with Python."""
    if not is_distributed() or get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if hasattr(store, 'clone'):
        # A connection of its own: that of torch is busy while a rank waits.
        store = store.clone()
    looks = int(os.environ.get('LOCAL_RANK', '0')) < 2
    limit = float(os.environ.get(_VARIABLE, _DEFAULT))
    # Named before it is given up.
    patience = min(_PATIENCE, limit / 2) if limit else _PATIENCE
    heartbeat = Heartbeat(store, get_rank(), get_world_size(), looks, patience, limit)
    heartbeat.start()
    atexit.register(heartbeat.stop)
