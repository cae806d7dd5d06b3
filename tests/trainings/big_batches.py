"""A trainer that waits to be killed: its workers start, or have loaded more than a pipe holds."""

import sys
import time

from torch.utils.data import DataLoader

from mmvttt.openmmlab.reliability.signals import ignore_signals_in_workers


class Big:
    """Samples of 200 kB that go through the pipe, not through shared memory."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> bytes:
        return bytes(200_000)


def start_slowly(worker: int) -> None:
    time.sleep(2)


if __name__ == '__main__':
    start = start_slowly if sys.argv[1] == 'starting' else None
    loader = DataLoader(Big(), num_workers=2, collate_fn=list, worker_init_fn=start)
    ignore_signals_in_workers(loader)
    iterator = iter(loader)
    if start is None:
        next(iterator)
    time.sleep(1)
    print(*(worker.pid for worker in iterator._workers), flush=True)
    time.sleep(600)
