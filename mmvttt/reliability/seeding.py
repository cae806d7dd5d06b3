"""Random numbers as a function of where a training is: (seed, rank, purpose, step, …)."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch

# Purposes of random numbers, which share a seed, a rank and a step.
IMAGE, STEP, VALIDATION = range(3)

Key = tuple[int, ...]


def seed_everything(key: Key) -> None:
    """Seeds `random`, NumPy and torch (every device) from a few non-negative integers."""
    python, numpy, torch_ = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(python))
    np.random.seed(numpy)
    if _has_accelerator():
        torch.manual_seed(int(torch_))
    else:
        # torch.manual_seed also notes the seed, with a stack trace, for devices that may be
        # initialised later: milliseconds an image.
        torch.default_generator.manual_seed(int(torch_))


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
