"""Names the rank that hangs or is gone, long before a collective of the others gives up."""

from __future__ import annotations

import atexit
import logging
import os
import re
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
_LEFT = b'left'
# Words of the errors of gloo and NCCL when a peer is gone.
_GONE = re.compile(r'gloo|nccl|peer|connection', re.IGNORECASE)


class Heartbeat:
    """A thread that writes a number every few seconds, and looks whether the others do.

    A process that is stopped, and a node that is gone, writes none; one that computes does.

    Args:
        store: Store of torch.distributed, which all ranks share.
        rank: This process's.
        ranks: How many there are.
        local_rank: On its node. The first two look after all others, the second one for the case
            that the first is silent.
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
        local_rank: int,
        patience: float = _PATIENCE,
        limit: float = 0,
        give_up: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.store = dist.PrefixStore('mmvttt_heartbeat', store)
        self.rank, self.ranks, self.local_rank = rank, ranks, local_rank
        self.patience, self.limit, self.give_up = patience, limit, give_up
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

    def gone(self) -> list[str]:
        """The ranks that write nothing any more, and where they are.

        Takes up to half of `patience`, since torchrun ends the others soon.
        """
        numbers = {r: self._number(r) for r in range(self.ranks) if r != self.rank}
        end = time.monotonic() + self.patience / 2
        while numbers and time.monotonic() < end:
            time.sleep(self.patience / 30)
            numbers = {r: n for r, n in numbers.items() if self._number(r) == n != _LEFT}
        return [f'rank {rank} ({self._place(rank)})' for rank in numbers]

    def _run(self) -> None:
        place = f'{socket.gethostname()!r}, process {os.getpid()}'
        number = 0
        try:
            self.store.set(f'place/{self.rank}', place)
            while not self._end.wait(self.patience / 3):
                number += 1
                self.store.set(f'beat/{self.rank}', str(number))
                if self.local_rank < 2:
                    self._look(time.monotonic())
            self.store.set(f'beat/{self.rank}', _LEFT.decode())
        except RuntimeError:
            # The store went with its process: torch reports that.
            return

    def _look(self, now: float) -> None:
        for rank in range(self.ranks):
            number = self._number(rank)
            before, since, named = self._heard.get(rank, (None, now, now))
            if number != before or number == _LEFT:
                self._heard[rank] = number, now, now
                continue
            if now - named < self.patience:
                continue
            self._heard[rank] = number, since, now
            if self.local_rank and now - self._heard[self.rank - 1][1] < self.patience:
                # The first one of this node names it.
                continue
            # Ranks other than 0 print errors only.
            print_log(
                f'rank {rank} ({self._place(rank)}) has been silent for {now - since:.0f} s: it '
                'is stopped, hangs, or its node is gone; the others wait for it',
                'current',
                logging.ERROR,
            )
            if self.limit and now - since > self.limit:
                print_log(
                    f'rank {rank} is given up after {self.limit:.0f} s ({_VARIABLE}): the training '
                    'ends; resume from the last checkpoint with --resume',
                    'current',
                    logging.ERROR,
                )
                self.give_up()

    def _number(self, rank: int) -> bytes:
        key = f'beat/{rank}'
        return self.store.get(key) if self.store.check([key]) else b''

    def _place(self, rank: int) -> str:
        key = f'place/{rank}'
        return self.store.get(key).decode() if self.store.check([key]) else 'it never started'


_running: Heartbeat | None = None


def start_heartbeat() -> None:
    """Starts the thread of this process, if it is one of several; it ends with Python."""
    global _running
    if not is_distributed() or get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if hasattr(store, 'clone'):
        # A connection of its own: that of torch is busy while a rank waits.
        store = store.clone()
    local_rank = int(os.environ.get('LOCAL_RANK', '0'))
    limit = float(os.environ.get(_VARIABLE, _DEFAULT))
    # Named before it is given up.
    patience = min(_PATIENCE, limit / 2) if limit else _PATIENCE
    _running = Heartbeat(store, get_rank(), get_world_size(), local_rank, patience, limit)
    _running.start()
    atexit.register(_running.stop)


def log_lost_ranks(error: RuntimeError) -> None:
    """Names the ranks that are gone, where a collective has failed: its own error names a port."""
    if _running is None or not _GONE.search(str(error)):
        return
    try:
        gone = ', '.join(_running.gone())
    except RuntimeError:
        gone = "the first node, with the store that all ranks share (rank 0's),"
    if gone:
        print_log(
            f'killed, or its node is down: {gone}; the training ends; resume from the last '
            'checkpoint with --resume',
            'current',
            logging.ERROR,
        )
