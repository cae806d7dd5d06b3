"""Lets the tests of the numbers import the helper modules beside them and those of the kernels."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / 'kernels')]

from kernel_testing import cut, default_backends, quick_and_poisoned  # noqa: E402, F401


@pytest.fixture(autouse=True)
def single_precision(monkeypatch):
    """Convolutions in fp32 are in TF32 on a GPU unless they are told otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
