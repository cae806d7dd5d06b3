"""Processes without a GPU: gloo, DDP and FSDP without device ids, SyncBN put aside."""

import re
from pathlib import Path

import pytest
import torch

from ..dist.launch import run_script

TINY = Path(__file__).parents[1] / 'trainings'

TRAIN = """
import sys
import torch
from mmvttt.openmmlab.apis.train import train
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
