"""The topology line, and what is advised where the learning rate is for another batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.reliability.topology_hook import advise

HERE = Path(__file__).parents[1] / 'dist'
MEANT = 'the learning rate 0.0001 is meant for 16 images a step, but this run has '


@pytest.mark.parametrize(
    ('images', 'accumulated', 'scaled', 'advice'),
    [
        (16, 1, False, None),
        (16, 2, False, None),
        (32, 1, True, None),
        (8, 1, False, f'{MEANT}8: scale it with --auto-scale-lr (to 5e-05)'),
        # mmengine's scaling does not know of the accumulation.
        (64, 4, False, f'{MEANT}64: set optim_wrapper.optimizer.lr=0.0004'),
        (
            64,
            4,
            True,
            'the learning rate was scaled for 16 images, but 4 batches are accumulated to 64: '
            'omit --auto-scale-lr and set optim_wrapper.optimizer.lr=0.0004',
        ),
    ],
)
def test_advice(images: int, accumulated: int, scaled: bool, advice: str | None) -> None:
    assert advise(1e-4, 16, images, accumulated, scaled) == advice


def test_the_rate_before_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of several nodes are in tests/dist/test_nodes.py."""
    monkeypatch.syspath_prepend(str(HERE))
    options = {
        'experiment_name': tmp_path.name,
        'train_cfg.max_epochs': 1,
        'optim_wrapper.accumulative_counts': 2,
        'train_dataloader.batch_size': 2,
    }
    train(HERE / 'small_config.py', work_dir=str(tmp_path), cfg_options=options)
    (log,) = tmp_path.glob('*/*.log')
    assert (
        'Topology: 1 node × 1 CPU process (1 process), 2 images each × 1 × 2 accumulated = '
        '4 images a step, learning rate 0.01 (configured 0.01 for 8 images, not scaled)\n'
    ) in log.read_text()
    warning = 'the learning rate 0.01 is meant for 8 images a step, but this run has 4: set optim'
    assert log.read_text().count(warning) == 1
