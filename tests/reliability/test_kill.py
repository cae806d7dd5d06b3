"""A kill at each operation on a file: the end is the same.

Tolerance: none, see test_exact_resume.py.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmvttt.checkpoints.read import read_content

from ..processes import run
from ..trainings.ends import require_same

TRAININGS = Path(__file__).parents[1] / 'trainings'


def states(folder: Path) -> dict[str, dict]:
    """Contents of the checkpoints of a folder, but for times and names of runs."""
    return {
        path.name: {k: v for k, v in read_content(path).items() if k not in ('meta', 'message_hub')}
        for path in sorted(folder.glob('*.pth'))
    }


def assert_same(whole: Path, killed: Path) -> None:
    """The same files, with the same content, and nothing half written."""
    require_same(states(killed), states(whole))
    last, expected_last = (Path((d / 'last_checkpoint').read_text()) for d in (killed, whole))
    assert last.name == expected_last.name
    assert not list(killed.glob('*.partial'))


EPOCHS = {'train_cfg.max_epochs': 16}
STEPS = {
    'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=72, val_interval=8),
    'default_hooks.checkpoint.by_epoch': False,
    'default_hooks.checkpoint.interval': 4,
}
# By epochs or steps; kept one, two or all; with and without an average and a data worker; validated
# more often than saved, and less often.
KINDS: dict[str, dict] = {
    'best': EPOCHS,
    'best-of-two': {**EPOCHS, 'default_hooks.checkpoint.max_keep_ckpts': 2},
    'all': {**EPOCHS, 'default_hooks.checkpoint.max_keep_ckpts': -1},
    'no-average': {**EPOCHS, 'custom_hooks': []},
    'rarely-saved': {**EPOCHS, 'default_hooks.checkpoint.interval': 3},
    'steps': STEPS,
    'accumulated-steps': {**STEPS, 'optim_wrapper.accumulative_counts': 2},
    'worker': {'train_cfg.max_epochs': 4, 'train_dataloader.num_workers': 1},
    'two-ranks': {'train_cfg.max_epochs': 6},
}


def points_and_compare(folder: Path, ranks: int, options: dict) -> int:
    command = TRAININGS / 'kill_points.py', folder, ranks, json.dumps(options)
    env = os.environ | {'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo'}
    done = run(sys.executable, *command, env=env, timeout=3600)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout.splitlines()[-1])['points']
    for number in range(1, points + 1):
        assert_same(folder / 'whole', folder / f'killed_{number}')
        shutil.rmtree(folder / f'killed_{number}')
    return points


def test_a_kill_at_each_file_operation_of_an_epoch(tmp_path: Path) -> None:
    assert points_and_compare(tmp_path, 1, {'train_cfg.max_epochs': 1}) > 8


@pytest.mark.stress
@pytest.mark.parametrize('kind', KINDS)
def test_a_kill_at_each_file_operation(tmp_path: Path, kind: str) -> None:
    """A thousand points in all."""
    ranks = 2 if kind == 'two-ranks' else 1
    assert points_and_compare(tmp_path, ranks, KINDS[kind]) >= 50


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='looks for processes in /proc')
@pytest.mark.parametrize('workers', ['starting', 'loaded'])
def test_workers_end_with_a_trainer_that_is_killed(workers: str) -> None:
    """While they start, or wait for room in a pipe whose two ends they hold."""
    command = [sys.executable, str(TRAININGS / 'big_batches.py'), workers]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        pids = trainer.stdout.readline().split()
    finally:
        trainer.kill()
        trainer.wait()
    assert len(pids) == 2
    end = time.monotonic() + 60
    while left := [pid for pid in pids if Path('/proc', pid).is_dir()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
