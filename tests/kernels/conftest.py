"""Lets the tests of the kernels import the helper modules beside them, and tools/dev."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / 'tools' / 'dev')]

from kernel_testing import cut, default_backends, quick_and_poisoned  # noqa: E402, F401


@pytest.fixture
def several_programs(monkeypatch):
    """Shares a sum among as many programs as there are blocks, which few then add up.

    And makes the tiles of deform_attn larger: the interpreter takes its time for each program.
    """
    from ttt_kernels import _launch
    from ttt_kernels.deform_attn import kernel

    monkeypatch.setattr(_launch, '_ENOUGH', 1 << 20)
    monkeypatch.setattr(_launch, '_LEAST_BLOCKS', 1)
    monkeypatch.setattr(_launch, '_COLUMNS', 1024)
    config = kernel.config

    def large_tiles(name, dtype, dim):
        tiles = {'PIXELS': 32, 'POINTS': 8} if name == 'backward_value' else {'ROWS': 64}
        return config(name, dtype, dim) | tiles

    monkeypatch.setattr(kernel, 'config', large_tiles)
