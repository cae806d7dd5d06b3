"""Signals that ask a training to save or stop. All ranks agree on the step."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mmengine.dist import get_world_size
from mmengine.runner import Runner

# Requests by increasing priority.
GO_ON, SAVE, STOP = range(3)
# Signals that launchers and schedulers send to a process group, and their requests. Windows lacks
# two of them, and signal masks.
_TO_THE_GROUP = {
    getattr(signal, name): request
    for name, request in dict(SIGTERM=STOP, SIGINT=STOP, SIGHUP=STOP, SIGUSR1=SAVE).items()
    if hasattr(signal, name)
}
_mask = getattr(signal, 'pthread_sigmask', lambda *_: ())
_SET, _BLOCK, _UNBLOCK = (getattr(signal, f'SIG_{n}', 0) for n in ('SETMASK', 'BLOCK', 'UNBLOCK'))
# Seconds within which a second Ctrl-C is the same one, sent by a terminal, a launcher or `timeout`.
_SECONDS_OF_A_SIGNAL = 1.0
_SECONDS_OF_A_WATCH = 2.0


class Preempted(SystemExit):
    """Ends the process after a SIGTERM or Ctrl-C, once a checkpoint is written."""


class Requests:
    """Receives SIGTERM, SIGINT, SIGHUP and SIGUSR1. All ranks act on them at the same step.

    Attributes:
        group: All ranks on CPUs, so that asking does not wait for a GPU, or None with one process.
        name: The signal received, or 'a signal' if another rank has received it.
        listening: Between `listen` and `close`.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.name = 'a signal'
        self.listening = False
        self._requested = GO_ON
        self._last = (0, 0.0)
        self._former: dict[int, Any] = {}
        self._poll: tuple[dist.Work, torch.Tensor] | None = None

    def listen(self) -> None:
        """Installs the signal handlers on all ranks."""
        self.listening = True
        if get_world_size() > 1:
            group: Any = dist.new_group(backend='gloo')
            self.group = group
        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number, request in _TO_THE_GROUP.items():
                ignored = signal.getsignal(number) == signal.SIG_IGN
                # As nohup does with SIGHUP.
                if number in (signal.SIGTERM, signal.SIGINT) or not ignored:
                    self._former[number] = signal.signal(number, partial(self._on_signal, request))

    def close(self) -> None:
        """Restores the previous handlers on all ranks."""
        self.listening = False
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
        if self._poll is not None:
            self._poll[0].wait()
            self._poll = None
        if self.group is not None:
            # A gloo thread that is still running when Python exits may abort the process.
            dist.destroy_process_group(self.group)
            self.group = None

    def request(self, request: int) -> None:
        """Records `SAVE` or `STOP` on this rank, like a signal. `STOP` wins."""
        self._requested = max(self._requested, request)

    def poll(self) -> int:
        """Returns the strongest request of all ranks, with several ranks from the previous step.

        Every rank must call it at every step.
        """
        requested = self._requested
        if requested == SAVE:
            self._requested = GO_ON
        if self.group is None:
            return requested
        answer = GO_ON
        if self._poll is not None:
            work, flag = self._poll
            work.wait()
            answer = int(flag)
        flag = torch.tensor(requested)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self.group, async_op=True)
        self._poll = work, flag
        return answer

    def any(self, here: bool) -> bool:
        """Whether `here` is true on any rank. Waits for all."""
        value = torch.tensor(int(here))
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, self.group)
        return bool(value)

    def _on_signal(self, request: int, number: int, *_: Any) -> None:
        before, when = self._last
        again = number == before == signal.SIGINT
        if again and time.monotonic() > when + _SECONDS_OF_A_SIGNAL:
            raise KeyboardInterrupt
        if not again:
            self._last = number, time.monotonic()
            self.name = signal.Signals(number).name
        self.request(request)


def ignore_signals_in_workers(*loaders: Any) -> None:
    """Makes data workers ignore the signals of a process group, except a kill.

    A worker that exits on one would end the training before it has saved. Workers exit with their
    trainer, killed or not, or by `end_workers`.
    """
    for loader in loaders:
        context = loader.multiprocessing_context or multiprocessing
        # Otherwise a server process is the parent.
        trainer = os.getpid() if context.get_start_method() != 'forkserver' else None
        loader.worker_init_fn = partial(_init_worker, loader.worker_init_fn, trainer)
        loader._get_iterator = partial(_remembered, loader, loader._get_iterator)
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)


def _init_worker(then: Callable[[int], None] | None, trainer: int | None, worker: int) -> None:
    for number in _TO_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    _mask(_UNBLOCK, _TO_THE_GROUP)
    if then is not None:
        then(worker)
    if trainer is not None:
        threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()


def _end_with(trainer: int) -> None:
    """Ends this worker soon after its trainer ends.

    torch's own watchdog lets a worker first write its batch to a pipe whose other end its siblings
    hold: a batch that does not fit would block forever.
    """
    while os.getppid() == trainer:
        time.sleep(_SECONDS_OF_A_WATCH)
    os._exit(1)


def _remembered(loader: Any, make_iterator: Callable[[], Any]) -> Any:
    """Iterator for `end_workers` whose workers start with the signals blocked.

    torch installs a handler that ends them, shortly before `_init_worker` is called.
    """
    before = _mask(_BLOCK, _TO_THE_GROUP)
    try:
        iterator = make_iterator()
    finally:
        _mask(_SET, before)
    loader.latest_iterator = weakref.ref(iterator)
    return iterator


def end_workers(runner: Runner) -> None:
    """Ends the data workers of a finished training: persistent ones, or all after a failure.

    The garbage collector would close their queues first, so that they never see the end and are
    waited for, ten seconds each. An error's traceback keeps the iterator alive.
    """
    for loop in (runner._train_loop, runner._val_loop):
        loader: Any = getattr(loop, 'dataloader', None)
        latest = getattr(loader, 'latest_iterator', None)
        # Else only the persistent one.
        iterator: Any = latest() if latest else getattr(loader, '_iterator', None)
        if hasattr(iterator, '_shutdown_workers'):
            iterator._shutdown_workers()
            loader._iterator = None


def _kill_workers() -> None:
    """Kills workers at exit: Python would send a SIGTERM, which they ignore, and wait."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
