"""Nodes that would train different things are named; two that are taken away lose nothing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from mmvttt.openmmlab.reliability import settings

from ..dist.launch import kept, require_same_from, run_nodes, start_nodes, wait
from .test_resume import checkpoint

DIST = Path(__file__).parents[1] / 'dist'
SMALL, SLOW = DIST / 'small_config.py', DIST / 'slow_config.py'
EPOCHS = ('--cfg-options', 'train_cfg.max_epochs=4', 'default_hooks.checkpoint.interval=1')


def test_nodes_with_different_rates_do_not_train(tmp_path: Path) -> None:
    each = [['--cfg-options', f'optim_wrapper.optimizer.lr={rate}'] for rate in (0.01, 0.02)]
    each = [['--work-dir', str(tmp_path / 'w'), *options] for options in each]
    for end in wait(start_nodes(SMALL, tmp_path, each=each, processes=1), timeout=300):
        assert end.status == 1, end.text
        (line,) = [x for x in end.text.splitlines() if x.startswith('error: the nodes do not')]
        assert 'config.optim_wrapper.optimizer.lr is 0.01 on node' in line
        assert 'and 0.02 on node' in line
        assert '(rank 1)' in line


def test_a_file_that_one_node_lacks_stops_all(tmp_path: Path) -> None:
    # It could be resumed from, as far as can be seen before it is loaded.
    checkpoint(tmp_path / 'b' / 'epoch_1.pth')
    each = [['--work-dir', str(tmp_path / name)] for name in 'ab']
    nodes = start_nodes(SMALL, tmp_path, '--resume', each=each, processes=1)
    # Neither waits for the other until a time-out: both end by themselves.
    for end in wait(nodes, timeout=300):
        assert end.status == 1, end.text
        (line,) = [x for x in end.text.splitlines() if x.startswith('error: ')]
        assert re.search(f'is none on node .* and {tmp_path}/b/epoch_1.pth', line)


@pytest.mark.stress
@pytest.mark.parametrize('sent', [signal.SIGTERM, signal.SIGKILL])
def test_nodes_that_are_taken_away(tmp_path: Path, sent: signal.Signals) -> None:
    """By a scheduler, which warns, or without a warning."""
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    run_nodes(SLOW, tmp_path, '--work-dir', str(whole), *EPOCHS, processes=1)

    folder = tmp_path / 'stopped'
    nodes = start_nodes(SLOW, folder, '--work-dir', str(parts), *EPOCHS, processes=1)
    try:
        nodes[0].wait_for('[2][3/8]')
        for node in nodes:
            if sent == signal.SIGKILL:
                node.kill()
            else:
                node.process.send_signal(sent)
    finally:
        ends = wait(nodes, timeout=60)
    step, name = 8, 'epoch_1.pth'
    if sent == signal.SIGTERM:
        # Status 1 is torchrun's, which has got a signal; the ranks have ended by themselves.
        assert [end.status for end in ends] == [1, 1], [end.text[-4000:] for end in ends]
        assert 'SIGKILL' not in ends[0].text + ends[1].text
        ((name, number),) = re.findall(r'SIGTERM: stopped with .*/(iter_(\d+)\.pth)', ends[0].text)
        step = int(number)
        assert 11 <= step < 32
    assert name in [p.name for p in parts.glob('*.pth')]

    # Without NODE_RANK the nodes find each other by c10d rendezvous.
    args = ('--work-dir', str(parts), '--resume', *EPOCHS)
    run_nodes(SLOW, tmp_path, *args, processes=1, ranks=sent == signal.SIGKILL)
    require_same_from(step, kept(whole, 2), kept(parts, 2))


def test_sources_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of the other sign on one node trained on."""
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for sign in '+-':
        (tmp_path / 'my_loss.py').write_text(f'loss = {sign}1\n')
        digests.append(dict(settings._sources(['my_loss', 'no_such.module'])))
    assert digests[0].keys() == {f'the source of {n}' for n in ('mmvttt', 'ttt_kernels', 'my_loss')}
    assert {k for k in digests[0] if digests[0][k] != digests[1][k]} == {'the source of my_loss'}
