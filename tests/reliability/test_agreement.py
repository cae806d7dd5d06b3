"""Nodes that are about to train different things are named; so are ranks that fall silent."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from mmengine.config import Config

from mmvttt.errors import UsageError
from mmvttt.openmmlab.reliability import agreement
from mmvttt.openmmlab.reliability.heartbeat import Heartbeat
from mmvttt.openmmlab.reliability.settings import flatten

from ..dist.launch import free_port

RENDEZVOUS = Path(__file__).parents[2] / 'tools' / '_rendezvous.py'


def config(**changes: object) -> Config:
    cfg = Config(
        dict(
            model=dict(type='TinyModel', depth=2),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
            train_dataloader=dict(batch_size=2, dataset=dict(type='TinyData')),
            custom_hooks=[dict(type='EMAHook')],
            randomness=dict(seed=0),
            work_dir='a',
        )
    )
    cfg.merge_from_dict(changes)
    return cfg


def facts(cfg: Config) -> dict[str, str]:
    return {**dict(flatten(cfg)), **dict(agreement._annotations(cfg))}


@pytest.mark.parametrize(
    ('changes', 'named'),
    [
        ({'optim_wrapper.optimizer.lr': 0.2}, r'config\.optim_wrapper\.optimizer\.lr is 0\.1 on'),
        ({'train_dataloader.batch_size': 3}, r'batch_size is 2 on node .*rank 0.*and 3 on node'),
        ({'train_cfg.max_epochs': 3}, r'max_epochs is nothing on .* and 3 on'),
        ({'custom_hooks': []}, 'custom_hooks is 1 entries'),
    ],
)
def test_the_first_difference_is_named(
    changes: dict, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, 'get_world_size', lambda: 2)
    other = facts(config(**changes))
    monkeypatch.setattr(
        agreement, 'all_gather_object', lambda own: [own, ("node 'beta' (rank 1)", other)]
    )
    with pytest.raises(UsageError, match=named):
        agreement.require_same(facts(config()))
    # Places are a node's own affair.
    other.clear()
    other.update(facts(config(work_dir='b', **{'train_dataloader.dataset.data_root': '/mnt/x'})))
    agreement.require_same(facts(config()))


def test_annotations_are_compared_by_content(tmp_path: Path) -> None:
    found = []
    for name, text in (('a', '{}'), ('b', '{}'), ('c', '[]')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'a.json').write_text(text)
        dataset = {'data_root': str(tmp_path / name), 'ann_file': 'a.json'}
        found.append(facts(config(**{'train_dataloader.dataset': dataset})))
    assert found[0] == found[1] != found[2]


def test_sources_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of the other sign on one node trained on."""
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = Config(dict(custom_imports=dict(imports=['my_loss', 'no_such.module'])))
    found = []
    for sign in '+-':
        (tmp_path / 'my_loss.py').write_text(f'loss = {sign}1\n')
        found.append(dict(agreement._sources(cfg)))
    assert found[0].keys() == {f'the source of {n}' for n in ('mmvttt', 'ttt_kernels', 'my_loss')}
    assert {k for k in found[0] if found[0][k] != found[1][k]} == {'the source of my_loss'}


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_silent_rank_is_named_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ended, messages = dist.HashStore(), [], []
    monkeypatch.setattr(
        'mmvttt.openmmlab.reliability.heartbeat.print_log', lambda text, *_: messages.append(text)
    )
    options = dict(patience=0.5, limit=1.0, give_up=lambda: ended.append(1))
    first, leaves, hangs = (Heartbeat(store, rank, 3, rank < 2, **options) for rank in range(3))
    for heartbeat in (first, leaves, hangs):
        heartbeat.start()
    until(lambda: {1, 2} <= {r for r, heard in first._heard.items() if heard[0]})
    leaves.stop()
    # As SIGSTOP does: nothing more is heard of it.
    hangs.store = dist.PrefixStore('elsewhere', dist.HashStore())
    until(lambda: ended)
    first.stop()
    hangs.stop()
    place = f'rank 2 ({socket.gethostname()!r}, process {os.getpid()})'
    assert any(f'{place} has been silent for' in text for text in messages)
    assert 'rank 2 is given up after' in messages[-1]
    assert not any('rank 1' in text for text in messages)


def node(rank: int, port: str, nodes: int = 2, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(RENDEZVOUS), str(nodes), str(rank), '127.0.0.1', port],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, 'NODES_SAY_EVERY': '0.3', 'NODES_TIMEOUT': '60', **variables},
    )


def ends(*nodes: subprocess.Popen) -> list[tuple[int, str]]:
    texts = [n.communicate(timeout=60)[1] for n in nodes]
    return [(n.returncode, text) for n, text in zip(nodes, texts, strict=True)]


def test_who_is_missing_is_said() -> None:
    ((code, text),) = ends(node(0, free_port(), 3, NODES_TIMEOUT='1'))
    assert code == 1
    assert text.count('waiting for NODE_RANK 1, 2 of 3 nodes at 127.0.0.1:') >= 2
    ((code, text),) = ends(node(1, free_port(), NODES_TIMEOUT='1'))
    assert code == 1
    assert 'waiting for the first node (NODE_RANK=0)' in text


def test_a_number_that_is_wrong_or_given_twice_is_said() -> None:
    ((code, text),) = ends(node(2, free_port()))
    assert (code, text) == (1, 'error: NODE_RANK=2 is none of 0 to 1 of NNODES=2\n')
    where = free_port()
    for code, text in ends(*(node(r, where, 3) for r in (0, 1, 1))):
        assert code == 1
        assert 'NODE_RANK=1 was given twice' in text
