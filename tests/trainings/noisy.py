"""A model and a data set full of randomness, to see whether a resumed run repeats it."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import DATASETS, HOOKS, MODELS
from PIL import Image
from tiny import Regression
from torch import nn


@DATASETS.register_module(force=True)
class NoisyData(BaseDataset):
    """22 points, which every random number generator that a pipeline may use has disturbed."""

    def load_data_list(self) -> list[dict]:
        return [{'x': float(i) / 22, 'width': 1 + i % 2, 'height': 1} for i in range(22)]

    def prepare_data(self, idx: int) -> dict:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        x = torch.full((8,), self.get_data_info(idx)['x'] + noise)
        return {'x': x, 'y': x.sum(), 'index': idx}


@DATASETS.register_module(force=True)
class NoisyPictures(NoisyData):
    """The same points, each with a picture in the folder `set`."""

    def load_data_list(self) -> list[dict]:
        points = super().load_data_list()
        return [{**point, 'img_path': f'set/{i}.png'} for i, point in enumerate(points)]

    def prepare_data(self, idx: int) -> dict:
        with Image.open(self.get_data_info(idx)['img_path']) as image:
            image.load()
        return super().prepare_data(idx)


class Noise(nn.Module):
    """Adds random numbers in a training, as samplers of anchors and regions draw them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + random.random() + np.random.rand() if self.training else x


@MODELS.register_module(force=True)
class NoisyModel(Regression):
    """A network with noise, dropout and batch statistics."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1)
        self.net = nn.Sequential(*layers[:2], Noise(), *layers[2:])


@HOOKS.register_module(force=True)
class Spoil(Hook):
    """Makes a weight, or its average, NaN after a training step, counted from 1."""

    def __init__(self, step: int, average: bool = False) -> None:
        self.step, self.average = step, average

    def after_train_iter(self, runner: object, *_: object, **__: object) -> None:
        if runner.iter + 1 == self.step:
            (hook,) = (h for h in runner.hooks if isinstance(h, EMAHook))
            model = hook.ema_model.module if self.average else runner.model
            model.net[0].weight.data[0, 0] = torch.nan


@HOOKS.register_module(force=True)
class Carry(Hook):
    """Puts a path, which no checkpoint may hold, and a number into the message hub."""

    def after_train_iter(self, runner: object, *_: object, **__: object) -> None:
        runner.message_hub.update_info_dict(dict(a_path=Path('x'), a_number=3))


@HOOKS.register_module(force=True)
class Remember(Hook):
    """Keeps the scores of all validations, and their number, which it does not have at first."""

    def __init__(self) -> None:
        self.scores: list[dict[str, float]] = []

    def after_val_epoch(self, runner: object, metrics: dict[str, float]) -> None:
        self.scores.append({name: float(value) for name, value in metrics.items()})
        self.count = len(self.scores)


@HOOKS.register_module(force=True)
class Interrupt(Hook):
    """Ends the run before an epoch, counted from 0, as a kill would."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def before_train_epoch(self, runner: object) -> None:
        if runner.epoch == self.epoch:
            raise KeyboardInterrupt


@HOOKS.register_module(force=True)
class Terminate(Hook):
    """Sends a signal in a training step (counted from 1), to this process or its whole group."""

    def __init__(
        self, step: int, sent: str = 'SIGTERM', times: int = 1, group: bool = False
    ) -> None:
        self.step, self.times, self.group = step, times, group
        self.number = signal.Signals[sent]

    def before_train_iter(self, runner: object, *_: object, **__: object) -> None:
        for _ in range(self.times if runner.iter + 1 == self.step else 0):
            os.kill(0 if self.group else os.getpid(), self.number)
