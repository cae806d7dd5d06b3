"""Hooks of trainings on several ranks: what every rank has seen is kept, and a step made slow."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


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
