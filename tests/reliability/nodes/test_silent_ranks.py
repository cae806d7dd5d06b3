"""A rank that is stopped, or killed, is named by the others, long before gloo gives up."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ...dist.launch import Node, start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'slow_config.py'
LONG = ('--cfg-options', 'train_cfg.max_epochs=500')


def wait_for(node: Node, found: Callable[[], object], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, node.text()[-4000:]
        time.sleep(0.2)


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
        wait_for(node, lambda: 'Epoch(train)' in node.text())
        stopped = process_of(rank, node)
        # Not before it has been heard of.
        time.sleep(5)
        os.kill(stopped, signal.SIGSTOP)
        wait_for(node, lambda: 'is given up after 12 s' in node.text(), 60)
    finally:
        (end,) = wait([node], timeout=60)
    place = rf"rank {rank} \('.*', process {stopped}\) has been silent for \d+ s: it is stopped"
    assert len(re.findall(place, end.text)) == len(re.findall('has said nothing', end.text)) >= 1


@pytest.mark.stress
def test_a_killed_rank_of_another_node(tmp_path: Path) -> None:
    """The launcher of this node does not know of it, and gloo names a port."""
    each = [['--work-dir', str(tmp_path / 'w')]] * 2
    nodes = start_nodes(CONFIG, tmp_path, *LONG, each=each, processes=1)
    try:
        wait_for(nodes[0], lambda: 'Epoch(train)' in nodes[0].text())
        time.sleep(12)
        killed = process_of(1, nodes[1])
        os.kill(killed, signal.SIGKILL)
        wait_for(nodes[0], lambda: nodes[0].process.poll() is not None, 90)
    finally:
        end, _ = wait(nodes, timeout=1)
    assert re.search(rf"killed, or its node is down: rank 1 \('.*', process {killed}\);", end.text)
