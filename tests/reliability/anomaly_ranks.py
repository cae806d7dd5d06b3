"""Two ranks, one with a loss that is not finite: run by torchrun from test_anomaly.py.

Prints `<wrapper> <rank>: <message>` of each rank and wrapper; reaching the end is the test that no
rank waits for another.
"""

import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mmengine.dist import init_dist
from mmengine.model import BaseModel, MMDistributedDataParallel, MMFullyShardedDataParallel
from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import mmvttt  # noqa: F401
from mmvttt.openmmlab.reliability.anomaly_hook import AnomalyError, AnomalyHook


class Shared(nn.Module):
    """Subtracts the mean over all ranks, as a SyncBN does: every rank has to call it."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


class Net(BaseModel):
    """Two linear layers; the first overflows at a scale of 1e38."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = Shared()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.body[0].weight.data *= 10

    def forward(self, inputs: Tensor, scale: Tensor, mode: str) -> dict[str, Tensor]:
        return {'loss': self.body(self.shared(inputs) * scale).mean()}


def main() -> None:
    init_dist('pytorch')
    rank = dist.get_rank()
    linear = partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear))
    wrappers = {
        'DDP': MMDistributedDataParallel,
        'FSDP': partial(MMFullyShardedDataParallel, auto_wrap_policy=linear, use_orig_params=True),
    }
    for name, wrap in wrappers.items():
        model = wrap(Net())
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        AnomalyHook().before_train(SimpleNamespace(model=model, optim_wrapper=wrapper))
        inputs = torch.ones(2, 4) * torch.arange(4)
        for scale in (1.0, 1e38 if rank == 1 else 1.0):
            before = [p.clone() for p in model.parameters()]
            try:
                model.train_step(dict(inputs=inputs, scale=torch.tensor(scale)), wrapper)
            except AnomalyError as error:
                same = all(map(torch.equal, before, model.parameters()))
                what = 'kept' if same else 'changed'
                # Not print, which writes the end of the line by itself.
                sys.stdout.write(f'{name} {rank}: weights {what}. {error}\n')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
