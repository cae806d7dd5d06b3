"""Configs made small enough to be run for real, and training steps of them."""

import functools
import tempfile
from pathlib import Path

import torch

from mmvttt.openmmlab.analysis.memory import report as memory
from mmvttt.openmmlab.analysis.memory.report import MemoryUse, memory_use
from mmvttt.openmmlab.analysis.memory.training_step import TrainingStep
from mmvttt.openmmlab.analysis.models import find_model
from mmvttt.openmmlab.config import load_config

from ...configs.reduced import SIZE, reduce_model

FLOAT = 4
_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def reduced(name: str) -> str:
    """The path of a config of the same name with a small model."""
    path = Path(_FOLDER.name) / f'{name}.py'
    reduce_model(load_config(name)).dump(path)
    return str(path)


def step_of(name: str, dry: bool, with_cp: str = 'none', amp: str = 'none') -> TrainingStep:
    torch.manual_seed(0)
    found = find_model(reduced(name), weightless=dry)
    memory.set_checkpointing(found.model, with_cp)
    return TrainingStep(found, 2, SIZE, amp, None if dry else torch.device('cpu'))


@functools.cache
def use_of(name: str, with_cp: str) -> MemoryUse:
    return memory_use(reduced(name), 2, SIZE, 'none', with_cp)
