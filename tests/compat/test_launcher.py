"""Processes without a GPU: gloo, DDP and FSDP without device ids, SyncBN put aside."""

import re
import sys
from pathlib import Path

import pytest
import torch
from mmengine.model import MMFullyShardedDataParallel

from mmvttt.compat import launcher

from ..dist.launch import run_script

TINY = Path(__file__).parents[1] / 'trainings'

TRAIN = """
import sys
import torch
from mmvttt.apis.train import train
runner = train(sys.argv[1], launcher='pytorch', work_dir=sys.argv[2])
model = runner.model.module
assert type(runner.model).__name__ == 'MMDistributedDataParallel'
assert torch.distributed.get_backend() == 'gloo'
assert type(model.norm).__name__ != 'SyncBatchNorm', model.norm
seen = [None, None]
torch.distributed.all_gather_object(seen, model.seen)
# Each epoch shows all 16 samples once, shared out between the two.
assert sorted(seen[0][:8] + seen[1][:8]) == list(range(16)), seen
states = [None, None]
weights = {k: v.tolist() for k, v in model.named_parameters()}
torch.distributed.all_gather_object(states, weights)
assert states[0] == states[1]
assert runner.iter == 4, runner.iter
print(f'rank {torch.distributed.get_rank()} is fine')
"""


def test_two_processes_train_the_same_weights(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip('there is a GPU here: mmengine needs no patch')
    script = tmp_path / 'run.py'
    script.write_text(TRAIN)
    text = run_script(script, tmp_path / 'log', TINY / 'tiny_config.py', tmp_path / 'work')
    assert set(re.findall(r'rank (\d) is fine', text)) == {'0', '1'}
    assert 'SyncBN needs a GPU' in text
    assert (tmp_path / 'work' / 'epoch_2.pth').is_file()


def test_sharding_is_left_alone_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it stays on the CPU without one is shown in tests/dist/test_fsdp.py."""
    before = MMFullyShardedDataParallel.__init__
    monkeypatch.setattr(launcher, '_no_gpu', lambda: False)
    assert launcher.shard_without_devices() == 'there is a GPU'
    assert launcher.launch_with_gloo() == 'there is a GPU'
    assert MMFullyShardedDataParallel.__init__ is before


def test_the_group_is_left_at_the_end_unless_there_was_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = []
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: not left)
    monkeypatch.setattr(torch.distributed, 'destroy_process_group', lambda: left.append(1))
    # Python sets it after printing a traceback.
    monkeypatch.setattr(sys, 'last_value', ValueError(), raising=False)
    launcher._leave()
    assert left == []
    monkeypatch.delattr(sys, 'last_value')
    launcher._leave()
    launcher._leave()
    assert left == [1]
