"""A model without batch statistics, its data, and a hook that keeps what every rank has seen."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from mmengine.dataset import BaseDataset
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from mmengine.runner import Runner
from torch import Tensor, nn


@DATASETS.register_module(force=True)
class SmallData(BaseDataset):
    """64 points of the plane and a smooth function of them."""

    def load_data_list(self) -> list[dict]:
        points = torch.rand(64, 5, generator=torch.Generator().manual_seed(0))
        return [{'x': x, 'y': (3 * x).sin().sum(), 'index': i} for i, x in enumerate(points)]


@MODELS.register_module(force=True)
class SmallModel(BaseModel):
    """Two hidden layers: its loss for a batch is the mean of those for the batch's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 17), nn.GELU()
        )
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor, y: Tensor, mode: str, **_: Any) -> dict[str, Tensor]:
        return {'loss': ((self.head(self.layers(x))[:, 0] - y) ** 2).mean()}


@HOOKS.register_module(force=True)
class Keep(Hook):
    """Writes `rank_R.pth` to the work directory: samples and losses by step, and the weights.

    Under FSDP the weights are those that the rank holds.
    """

    def __init__(self) -> None:
        # Of this process alone: a resume would restore lists, those of rank 0.
        self.seen: deque[list[int]] = deque()
        self.losses: deque[float] = deque()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict
    ) -> None:
        samples = data_batch.get('index')
        if samples is None:
            samples = [sample.img_id for sample in data_batch['data_samples']]
        self.seen.append([int(i) for i in samples])
        self.losses.append(outputs['loss'].item())

    def after_train(self, runner: Runner) -> None:
        weights = {n: p.detach().clone() for n, p in runner.model.named_parameters()}
        kept = dict(seen=[*self.seen], losses=[*self.losses], weights=weights)
        torch.save(kept, Path(runner.work_dir) / f'rank_{runner.rank}.pth')


@HOOKS.register_module(force=True)
class Slow(Hook):
    """Makes a step last, so that a signal meets it."""

    def before_train_iter(self, *_: Any, **__: Any) -> None:
        time.sleep(0.2)
