"""The topology line, and what is advised where the batch is not that of the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmvttt.apis.train import train
from mmvttt.reliability.topology_hook import Topology, count_nodes

HERE = Path(__file__).parents[1] / 'dist'


def make(**changes: object) -> Topology:
    """Two nodes of four GPUs with two images each, at the rate that is meant for them."""
    given = dict(
        nodes=2,
        processes=8,
        backend='nccl',
        on_cpu=False,
        batch_size=2,
        accumulated=1,
        configured=1e-4,
        rates=(1e-4,),
        base_batch_size=16,
        scaled=False,
    )
    return Topology(**{**given, **changes})


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (
            dict(nodes=1, processes=1, backend=None, batch_size=1),
            '1 node × 1 GPU (1 process), 1 image each × 1 × 1 accumulated = 1 image a step',
        ),
        (dict(processes=4, on_cpu=True), '2 nodes × 2 CPU processes (4 processes, nccl)'),
        (dict(processes=7), '2 nodes × 7 GPUs in all (7 processes, nccl)'),
        (dict(accumulated=4), '2 images each × 8 × 4 accumulated = 64 images a step'),
        (dict(batch_size=None), ', batches of a size that their sampler does not say, learning'),
        (dict(), 'learning rate 0.0001 (configured 0.0001 for 16 images, not scaled)'),
        (dict(base_batch_size=None), '= 16 images a step, learning rate 0.0001'),
        (
            dict(rates=(1.4e-5, 5e-5, 1e-4)),
            'learning rate 1.4e-05 to 0.0001 by parameter (configured 0.0001 for 16 images, not',
        ),
    ],
)
def test_parts(changes: dict, words: str) -> None:
    assert words in str(make(**changes))


@pytest.mark.parametrize(
    ('changes', 'advice'),
    [
        (dict(), None),
        (dict(processes=16, scaled=True), None),
        (dict(base_batch_size=None, batch_size=1), None),
        (dict(batch_size=None), None),
        (dict(configured=None, batch_size=1), None),
        (dict(accumulated=2, batch_size=1), None),
        (
            dict(batch_size=1),
            'the learning rate 0.0001 is meant for 16 images a step, and this run has 8: scale it '
            'with --auto-scale-lr (to 5e-05), or keep 16 images with '
            'train_dataloader.batch_size=2',
        ),
        (
            dict(processes=3),
            'the learning rate 0.0001 is meant for 16 images a step, and this run has 6: scale it '
            'with --auto-scale-lr (to 3.75e-05)',
        ),
        # mmengine's scaling does not know of the accumulation.
        (
            dict(accumulated=4),
            'the learning rate 0.0001 is meant for 16 images a step, and this run has 64: set '
            'optim_wrapper.optimizer.lr=0.0004',
        ),
        (
            dict(accumulated=4, scaled=True),
            'the learning rate was scaled for 16 images, but 4 batches are accumulated to 64: '
            'leave --auto-scale-lr out and set optim_wrapper.optimizer.lr=0.0004',
        ),
    ],
)
def test_advice(changes: dict, advice: str | None) -> None:
    assert make(**changes).advice() == advice


def test_nodes_by_launcher() -> None:
    torchrun_under_slurm = {'GROUP_WORLD_SIZE': '2', 'SLURM_NNODES': '3'}
    assert count_nodes(torchrun_under_slurm, 'pytorch', 8) == 2
    assert count_nodes(torchrun_under_slurm, 'slurm', 8) == 3
    assert count_nodes(torchrun_under_slurm, 'none', 1) == 1
    assert count_nodes({'OMPI_COMM_WORLD_LOCAL_SIZE': '4'}, 'mpi', 8) == 2
    assert count_nodes({'OMPI_COMM_WORLD_LOCAL_SIZE': '4'}, 'mpi', 7) == 2
    for launcher in ('pytorch', 'slurm', 'mpi', 'none'):
        assert count_nodes({}, launcher, 4) == 1


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict], str]:
    """Trains the small model for an epoch, and returns the log."""
    monkeypatch.syspath_prepend(str(HERE))

    def log(**options: object) -> str:
        options = {
            'experiment_name': f'{tmp_path.name}_{len(options)}',
            'train_cfg.max_epochs': 1,
            **options,
        }
        train(HERE / 'small_config.py', work_dir=str(tmp_path), cfg_options=options)
        return max(tmp_path.glob('*/*.log')).read_text()

    return log


def test_hook_says_the_rate_before_the_warm_up_and_warns(log: Callable) -> None:
    text = log(**{'optim_wrapper.accumulative_counts': 2, 'train_dataloader.batch_size': 2})
    assert (
        'Topology: 1 node × 1 CPU process (1 process), 2 images each × 1 × 2 accumulated = '
        '4 images a step, learning rate 0.01 (configured 0.01 for 8 images, not scaled)\n'
    ) in text
    warning = 'the learning rate 0.01 is meant for 8 images a step, and this run has 4: set optim'
    assert text.count(warning) == 1
    text = log(**{'train_dataloader.batch_size': 8})
    assert '8 images each × 1 × 1 accumulated = 8 images a step' in text
    assert 'is meant for' not in text
