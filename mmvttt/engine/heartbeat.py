"""Says which rank of a distributed training hangs or is gone, long before a collective gives up."""

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

# Seconds after which a rank that says nothing ends the training; 0: never.
_VARIABLE, _DEFAULT = 'MMVTTT_SILENT_RANK_SECONDS', '900'


class Heartbeat:
    """A thread that writes a number every few seconds, and looks whether the others do.

    A process that is stopped, and a node that is gone, writes none; one that computes does.

    Args:
        store: Of torch.distributed, which all ranks share.
        rank: This process's.
        ranks: How many there are.
        watches: Whether it looks after the others: one process of each node does.
        beat: Seconds between two numbers.
        patience: Seconds after which a silent rank is named, again and again.
        limit: Seconds after which `give_up` is called; 0: never.
        give_up: Ends the process.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        watches: bool,
        beat: float = 10,
        patience: float = 30,
        limit: float = 0,
        give_up: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.store = dist.PrefixStore('mmvttt_heartbeat', store)
        self.rank, self.ranks, self.watches = rank, ranks, watches
        self.beat, self.patience, self.limit, self.give_up = beat, patience, limit, give_up
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name='heartbeat', daemon=True)
        # Rank: its number, since when, when it was last named.
        self._heard: dict[int, tuple[bytes, float, float]] = {}

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
            self.store.set(f'place/{self.rank}', place)
            while not self._end.wait(self.beat):
                number += 1
                self.store.set(f'beat/{self.rank}', str(number))
                if self.watches:
                    self._look(time.monotonic())
            self.store.set(f'beat/{self.rank}', 'left')
        except RuntimeError:
            # The store went with its process: torch says so on its own.
            return

    def _look(self, now: float) -> None:
        for rank in range(self.ranks):
            key = f'beat/{rank}'
            number = self.store.get(key) if self.store.check([key]) else b''
            before, since, named = self._heard.get(rank, (None, now, now))
            if number != before or number == b'left':
                self._heard[rank] = number, now, now
                continue
            if now - named < self.patience:
                continue
            self._heard[rank] = number, since, now
            where = self.store.get(f'place/{rank}').decode() if number else 'never heard of'
            print_log(
                f'rank {rank} ({where}) has said nothing for {now - since:.0f} s: it is stopped, '
                'hangs, or its node is gone; the others wait for it',
                'current',
                logging.WARNING,
            )
            if self.limit and now - since > self.limit:
                print_log(
                    f'rank {rank} is given up after {self.limit:.0f} s ({_VARIABLE}): the training '
                    'ends; --resume goes on from the last checkpoint',
                    'current',
                    logging.ERROR,
                )
                self.give_up()


def start_heartbeat() -> None:
    """Starts the thread of this process, if it is one of several; it ends with Python."""
    if not is_distributed() or get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if hasattr(store, 'clone'):
        # A connection of its own: that of torch is busy while somebody waits.
        store = store.clone()
    watches = os.environ.get('LOCAL_RANK', '0') == '0'
    limit = float(os.environ.get(_VARIABLE, _DEFAULT))
    heartbeat = Heartbeat(store, get_rank(), get_world_size(), watches, limit=limit)
    heartbeat.start()
    atexit.register(heartbeat.stop)
