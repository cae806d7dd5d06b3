"""Two nodes on this machine, of two processes each, train what one process would have trained."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from mmvttt.checkpoints.read import read_content
from mmvttt.openmmlab.apis.train import train

from .launch import kept, run_nodes

pytestmark = pytest.mark.stress
HERE = Path(__file__).parent
CONFIG = HERE / 'small_config.py'
# Sums of 4 samples' gradients in another order, in fp32, then AdamW, which divides by their size:
# 8 steps of rate 0.025 with relative errors of some 1e-6 in the gradients.
CLOSE = dict(rtol=1e-4, atol=1e-6)


def steps(ranks: list[dict]) -> list[list[int]]:
    """The samples of every step, of all ranks together."""
    return [sorted(chain(*parts)) for parts in zip(*(r['seen'] for r in ranks), strict=True)]


def test_two_nodes_train_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_nodes(CONFIG, tmp_path, '--work-dir', str(tmp_path / 'whole'), '--auto-scale-lr')
    ranks = kept(tmp_path / 'whole', 4)
    for rank in ranks[1:]:
        torch.testing.assert_close(rank['weights'], ranks[0]['weights'], rtol=0, atol=0)
    # Each epoch shows each of the 16 samples to one rank, once.
    assert all(len(batch) == 1 for rank in ranks for batch in rank['seen'])
    together = steps(ranks)
    assert len(together) == 8
    for epoch in (together[:4], together[4:]):
        assert sorted(chain(*epoch)) == list(range(16))
    assert together[:4] != together[4:]

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent / 'trainings'))
    options = {'train_dataloader.batch_size': 4}
    train(CONFIG, work_dir=str(tmp_path), auto_scale_lr=True, cfg_options=options)
    (alone,) = kept(tmp_path, 1)
    # The same samples make up each step.
    assert steps([alone]) == together
    losses = torch.tensor([r['losses'] for r in ranks]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(alone['losses']), **CLOSE)
    bare = {n.removeprefix('module.'): p for n, p in ranks[0]['weights'].items()}
    torch.testing.assert_close(bare, alone['weights'], **CLOSE)
    # Not trivial: the second epoch has moved them.
    first = read_content(tmp_path / 'epoch_1.pth')['state_dict']
    assert not any(torch.equal(weight, first[name]) for name, weight in bare.items())
