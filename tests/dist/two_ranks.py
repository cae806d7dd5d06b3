"""What two ranks on CPUs do, for test_two_ranks.py: one start of the processes serves all of it.

Writes to the folder of its first argument. Reaching the end is the test that no rank waits for
another.
"""

import logging
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.model import BaseModel, MMDistributedDataParallel, MMFullyShardedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODEL_WRAPPERS
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from mmvttt.models import Vittt
from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.engine import CompileHook
from mmvttt.openmmlab.reliability.anomaly_hook import AnomalyError, AnomalyHook

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.argv[1])


def tiny_training() -> None:
    """On every rank: the samples it has seen and its weights."""
    config = ROOT / 'tests' / 'trainings' / 'tiny_config.py'
    runner = train(config, launcher='pytorch', work_dir=str(FOLDER / 'work'))
    model = runner.model.module
    assert type(runner.model).__name__ == 'MMDistributedDataParallel'
    assert dist.get_backend() == 'gloo'
    assert type(model.norm).__name__ != 'SyncBatchNorm', model.norm
    assert runner.iter == 4, runner.iter
    weights = dict(model.named_parameters())
    torch.save((model.seen, weights), FOLDER / f'tiny_{dist.get_rank()}.pth')


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


def bad_loss_of_one_rank() -> None:
    """Prints `<wrapper> <rank>: <message>` of each rank and wrapper."""
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
                # Not print, which writes the end of the line by itself.
                sys.stdout.write(
                    f'{name} {rank}: weights {"kept" if same else "changed"}. {error}\n'
                )


class Normed(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, inputs: Tensor, mode: str) -> dict[str, Tensor]:
        return dict(loss=self.norm(inputs).square().mean())


def statistics_of_imagenet() -> None:
    """BatchNorm's means after two steps, with H-ViT³'s ImageNet recipe and ddp.py."""
    model, rank = Normed(), dist.get_rank()
    wrapper = Config.fromfile(ROOT / 'configs' / '_base_' / 'ddp.py').model_wrapper_cfg
    wrapped = MODEL_WRAPPERS.build(wrapper, default_args=dict(module=model))
    for hook in Config.fromfile(ROOT / 'configs' / 'hvit3_s_in1k.py').custom_hooks:
        if hook.type == 'mmvttt.BroadcastBuffersHook':
            HOOKS.build(hook).before_train(SimpleNamespace(model=wrapped))
    optimizer = OptimWrapper(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        # Means 1 and 10 in the first step, 2 and 20 in the second.
        mean = (step + 1) * (1.0, 10.0)[rank]
        wrapped.train_step(dict(inputs=torch.tensor([[mean - 1], [mean + 1]])), optimizer)
    torch.save(model.norm.running_mean, FOLDER / f'mean_{rank}.pth')


class Wrapped(BaseModel):
    """The loss of a backbone; the blocks of different images learn different things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=32)
        self.backbone = Vittt(sizes, img_size=32)

    def forward(self, inputs: Tensor, mode: str) -> dict[str, Tensor]:
        return dict(loss=self.backbone(inputs)[0].square().mean())


def gradients_of_compiled_backbones() -> None:
    """Gradients of two steps: eager, with compiled blocks, with the backbone as one graph."""
    rank, gradients = dist.get_rank(), []
    for options in (None, {}, dict(whole=True, dynamic=False)):
        model = MMDistributedDataParallel(Wrapped())
        if options is not None:
            hook = CompileHook(options=dict(backend='aot_eager', **options))
            hook.before_run(SimpleNamespace(model=model, logger=logging.getLogger()))
        for step in range(2):
            torch.manual_seed(2 * step + rank)
            model.zero_grad()
            model(torch.randn(2, 3, 32, 32), mode='loss')['loss'].backward()
        gradients.append({n: p.grad for n, p in model.module.named_parameters()})
    torch.save(gradients, FOLDER / f'compiled_{rank}.pth')


if __name__ == '__main__':
    tiny_training()
    gradients_of_compiled_backbones()
    bad_loss_of_one_rank()
    statistics_of_imagenet()
    dist.destroy_process_group()
