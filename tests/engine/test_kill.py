"""`kill -9` at random moments: the last good checkpoint is there, and the end is the same.

Tolerance: none, see test_exact.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmvttt.checkpoints.read import read_content

SCRIPT = Path(__file__).parents[1] / 'trainings' / 'kill_runs.py'


def states(folder: Path) -> dict[str, dict]:
    """What the checkpoints of a folder hold, but for times and names of runs."""
    found = {p.name: read_content(p) for p in folder.glob('*.pth')}
    return {
        name: {k: v for k, v in content.items() if k not in ('meta', 'message_hub')}
        for name, content in found.items()
    }


def kill_runs(folder: Path, kills: int | str, options: dict) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(kills), json.dumps(options)],
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    logs = ''.join(p.read_text()[-2000:] for p in folder.glob('*.log'))
    assert done.returncode == 0, done.stderr + logs[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_same(whole: Path, killed: Path) -> None:
    """The same files, with the same content, and nothing half written."""
    expected, found = states(whole), states(killed)
    assert found.keys() == expected.keys()
    for name in expected:
        one, tree = torch.utils._pytree.tree_flatten(found[name])
        other, expected_tree = torch.utils._pytree.tree_flatten(expected[name])
        assert tree == expected_tree
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
    assert (killed / 'last_checkpoint').read_text() == str(
        killed / Path((whole / 'last_checkpoint').read_text()).name
    )
    assert not list(killed.glob('.*'))


def kill_and_compare(folder: Path, kills: int, options: dict) -> dict:
    seen = kill_runs(folder, kills, options)
    assert_same(folder / 'whole', folder / 'killed')
    return seen


def test_a_few_kills(tmp_path: Path) -> None:
    seen = kill_and_compare(tmp_path, 3, {'train_cfg.max_epochs': 12})
    assert seen['kills'] == 3
    # The third one waits until a checkpoint is being written.
    assert seen['half_written'] >= 1


@pytest.mark.stress
@pytest.mark.parametrize(
    'options',
    [{}, {'train_dataloader.num_workers': 1}],
    ids=['epochs', 'worker'],
)
def test_twenty_kills(tmp_path: Path, options: dict) -> None:
    seen = kill_and_compare(tmp_path, 20, {'train_cfg.max_epochs': 40, **options})
    print(seen)
    assert seen['kills'] == 20
    assert seen['half_written'] >= 1
    assert len(set(seen['at'])) >= 5


SMALL = {'model.width': 16, 'model.seconds': 0}
EVERY = {
    'best': {},
    'best-of-two': {'default_hooks.checkpoint.max_keep_ckpts': 2},
    'all': {'default_hooks.checkpoint.max_keep_ckpts': -1},
    'steps': {
        'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=40, val_interval=8),
        'default_hooks.checkpoint.by_epoch': False,
        'default_hooks.checkpoint.interval': 4,
    },
    'no average': {'custom_hooks': []},
    'worker': {'train_dataloader.num_workers': 1, 'train_cfg.max_epochs': 3},
}


def every(folder: Path, options: dict) -> int:
    kills = kill_runs(folder, 'every', options)['kills']
    for operation in range(1, kills + 1):
        assert_same(folder / 'whole', folder / f'killed_{operation}')
    return kills


@pytest.mark.stress
def test_a_kill_at_every_file_operation(tmp_path: Path) -> None:
    assert every(tmp_path, {**SMALL, 'train_cfg.max_epochs': 1}) > 8


@pytest.mark.stress
@pytest.mark.parametrize('kind', EVERY)
def test_a_kill_at_every_file_operation_of_longer_runs(tmp_path: Path, kind: str) -> None:
    kills = every(tmp_path, {**SMALL, 'train_cfg.max_epochs': 20, **EVERY[kind]})
    print(kind, kills)
    assert kills > 20
