"""A rank that is stopped is named by the others, long before gloo gives up."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from ...dist.launch import Node, start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'slow_config.py'
LONG = ('--cfg-options', 'train_cfg.max_epochs=500')


def process_of(rank: int, node: Node) -> int:
    """The process of a rank of a node."""
    for process in Path('/proc').glob('[0-9]*'):
        try:
            variables = (process / 'environ').read_bytes().split(b'\0')
        except OSError:
            continue
        if {f'MMVTTT_TEST_NODE={node.mark}'.encode(), f'RANK={rank}'.encode()} <= set(variables):
            return int(process.name)
    raise AssertionError(node.text())


@pytest.mark.stress
@pytest.mark.parametrize('rank', [0, 1])
def test_a_stopped_rank(tmp_path: Path, rank: int) -> None:
    """The first one too, which looks after the others."""
    variables = {'MMVTTT_SILENT_RANK_SECONDS': '12'}
    args = (CONFIG, tmp_path, '--work-dir', str(tmp_path / 'w'), *LONG)
    (node,) = start_nodes(*args, nodes=1, variables=variables)
    try:
        node.wait_for('Epoch(train)')
        stopped = process_of(rank, node)
        # Not before it has been heard of.
        time.sleep(5)
        os.kill(stopped, signal.SIGSTOP)
        node.wait_for('is given up after 12 s', 60)
    finally:
        (end,) = wait([node], timeout=60)
    place = rf"rank {rank} \('.*', process {stopped}\) has been silent for \d+ s: it is stopped"
    assert len(re.findall(place, end.text)) == len(re.findall('has been silent', end.text)) >= 1
