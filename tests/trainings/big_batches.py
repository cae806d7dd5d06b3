"""A trainer whose data workers have loaded more than a pipe holds, and which waits to be killed."""

import time

from torch.utils.data import DataLoader

from mmvttt.openmmlab.reliability.signals import ignore_signals_in_workers


class Big:
    """Samples of 200 kB that go through the pipe, not through shared memory."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> bytes:
        return bytes(200_000)


if __name__ == '__main__':
    loader = DataLoader(Big(), batch_size=1, num_workers=2, collate_fn=list)
    ignore_signals_in_workers(loader)
    iterator = iter(loader)
    next(iterator)
    time.sleep(1)
    print(*(worker.pid for worker in iterator._workers), flush=True)
    time.sleep(600)
