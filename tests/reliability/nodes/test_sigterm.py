"""Two nodes are taken away in the middle of a training, warned or not: nothing is lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from ...dist.launch import kept, require_same_from, run_nodes, start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'slow_config.py'
EPOCHS = ('--cfg-options', 'train_cfg.max_epochs=4', 'default_hooks.checkpoint.interval=1')


@pytest.mark.stress
@pytest.mark.parametrize('sent', [signal.SIGTERM, signal.SIGKILL])
def test_nodes_that_are_taken_away(tmp_path: Path, sent: signal.Signals) -> None:
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    run_nodes(CONFIG, tmp_path, '--work-dir', str(whole), *EPOCHS, processes=1)

    folder = tmp_path / 'stopped'
    nodes = start_nodes(CONFIG, folder, '--work-dir', str(parts), *EPOCHS, processes=1)
    try:
        nodes[0].wait_for('[2][3/8]')
        for node in nodes:
            if sent == signal.SIGKILL:
                node.kill()
            else:
                node.process.send_signal(sent)
    finally:
        ends = wait(nodes, timeout=60)
    step = 8
    if sent == signal.SIGTERM:
        # Status 1 is torchrun's, which has got a signal; the ranks have ended by themselves.
        assert [end.status for end in ends] == [1, 1], [end.text[-4000:] for end in ends]
        assert 'SIGKILL' not in ends[0].text + ends[1].text
        (found,) = re.findall(r'SIGTERM: stopped with .*/iter_(\d+)\.pth', ends[0].text)
        step = int(found)
        assert 11 <= step < 32
    last = f'iter_{step}.pth' if step != 8 else 'epoch_1.pth'
    assert last in [p.name for p in parts.glob('*.pth')]

    run_nodes(CONFIG, tmp_path, '--work-dir', str(parts), '--resume', *EPOCHS, processes=1)
    require_same_from(step, kept(whole, 2), kept(parts, 2))
