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

SCRIPT = Path(__file__).parents[1] / 'trainings' / 'kill_runs.py'


def states(folder: Path) -> dict[str, dict]:
    """What the checkpoints of a folder hold, but for times and names of runs."""
    found = {p.name: torch.load(p, weights_only=True) for p in folder.glob('*.pth')}
    return {
        name: {k: v for k, v in content.items() if k not in ('meta', 'message_hub')}
        for name, content in found.items()
    }


def kill_and_compare(folder: Path, kills: int, options: dict) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(kills), json.dumps(options)],
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    log = folder / 'killed.log'
    assert done.returncode == 0, done.stderr + (log.read_text()[-2000:] if log.exists() else '')
    expected, killed = states(folder / 'whole'), states(folder / 'killed')
    assert killed.keys() == expected.keys()
    for name in expected:
        one, tree = torch.utils._pytree.tree_flatten(killed[name])
        other, expected_tree = torch.utils._pytree.tree_flatten(expected[name])
        assert tree == expected_tree
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
    assert not list((folder / 'killed').glob('.*.partial'))
    return json.loads(done.stdout.splitlines()[-1])


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
