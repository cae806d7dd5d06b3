"""A scheduler takes two nodes away in the middle of a training, and nothing is lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from ...dist.launch import kept, require_same_from, run_nodes, start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'slow_config.py'
EPOCHS = ('--cfg-options', 'train_cfg.max_epochs=4')


@pytest.mark.stress
def test_sigterm_to_the_shell_of_every_node(tmp_path: Path) -> None:
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    run_nodes(CONFIG, tmp_path, '--work-dir', str(whole), *EPOCHS, processes=1)

    folder = tmp_path / 'stopped'
    nodes = start_nodes(CONFIG, folder, '--work-dir', str(parts), *EPOCHS, processes=1)
    try:
        nodes[0].wait_for('[2][3/8]')
        for node in nodes:
            node.process.send_signal(signal.SIGTERM)
    finally:
        ends = wait(nodes, timeout=60)
    # Status 1 is torchrun's, which has got a signal; the ranks have ended by themselves.
    assert [end.status for end in ends] == [1, 1], [end.text[-4000:] for end in ends]
    assert 'SIGKILL' not in ends[0].text + ends[1].text
    (step,) = re.findall(r'SIGTERM: stopped with .*/iter_(\d+)\.pth', ends[0].text)
    assert 11 <= int(step) < 32
    assert [p.name for p in parts.glob('*.pth')] == [f'iter_{step}.pth']

    run_nodes(CONFIG, tmp_path, '--work-dir', str(parts), '--resume', *EPOCHS, processes=1)
    require_same_from(int(step), kept(whole, 2), kept(parts, 2))
