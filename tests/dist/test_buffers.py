"""H-ViT³'s BatchNorm statistics on several ranks, as its authors train on ImageNet."""

from pathlib import Path

import pytest
import torch

from .launch import run_script


def test_each_step_begins_with_the_statistics_of_rank_0(tmp_path: Path) -> None:
    run_script(Path(__file__).parent / 'buffers_run.py', tmp_path / 'log', tmp_path)
    means = [torch.load(tmp_path / f'{rank}.pth').item() for rank in range(2)]
    # Rank 0's mean after the first step is .1; momentum .1. Without it, rank 1 has 2.9.
    assert means == pytest.approx([0.9 * 0.1 + 0.1 * 2, 0.9 * 0.1 + 0.1 * 20])
