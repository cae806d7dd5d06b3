"""Which checkpoint a run resumes from, and the message where there is none."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mmvttt.errors import ResumeError
from mmvttt.openmmlab.reliability import resume
from mmvttt.openmmlab.reliability.data.contents import file_digest
from mmvttt.openmmlab.reliability.resume import RUN_ID, latest_checkpoint, why_not_resumable


def checkpoint(path: Path, step: int = 2, run: str = 'a', **changes: object) -> Path:
    weights = torch.arange(1000.0)
    hub = dict(runtime_info={RUN_ID: run})
    content = dict(meta=dict(epoch=1, iter=step), state_dict={'w': weights}, message_hub=hub)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({k: v for k, v in (content | changes).items() if v is not None}, path)
    return path


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == 'truncated':
        path.write_bytes(data[: len(data) // 2])
    elif kind == 'empty':
        path.write_bytes(b'')
    elif kind == 'flipped':
        # In the middle of the numbers, where no structure would show it.
        where = data.index(torch.arange(1000.0).numpy().tobytes()) + 2000
        data[where] ^= 1
        path.write_bytes(data)


def test_the_furthest_is_taken(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) == (None, [])
    assert latest_checkpoint(tmp_path / 'nowhere') == (None, [])
    furthest = checkpoint(tmp_path / 'epoch_2.pth', 4)
    # As after `cp -r`: the first one has the later time.
    first = checkpoint(tmp_path / 'epoch_1.pth', 2)
    checkpoint(tmp_path / 'best_mAP_epoch_3.pth', 6)
    assert latest_checkpoint(tmp_path) == (str(furthest), [])
    # An outdated pointer, as a kill leaves it.
    (tmp_path / 'last_checkpoint').write_text(str(first))
    assert latest_checkpoint(tmp_path) == (str(furthest), [])
    # A former training's do not count.
    checkpoint(tmp_path / 'epoch_12.pth', 24, 'old')
    assert latest_checkpoint(tmp_path) == (str(furthest), [])


def test_last_checkpoint_may_point_elsewhere(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / 'work' / 'epoch_1.pth', 2)
    there = checkpoint(tmp_path / 'elsewhere' / 'epoch_2.pth', 4)
    pointer = tmp_path / 'work' / 'last_checkpoint'
    pointer.write_text(str(there))
    assert latest_checkpoint(tmp_path / 'work') == (str(there), [])
    # A copied folder, in whose original another training has begun.
    checkpoint(there, 6, 'new')
    assert latest_checkpoint(tmp_path / 'work') == (str(there), [])
    copied = checkpoint(tmp_path / 'work' / 'epoch_2.pth', 4)
    assert latest_checkpoint(tmp_path / 'work') == (str(copied), [])
    copied.unlink()
    for nonsense in ('', '\n', '/nowhere/epoch_9.pth', '\0' * 40, 'x' * 9000):
        pointer.write_text(nonsense)
        assert latest_checkpoint(tmp_path / 'work') == (str(here), [])
    pointer.write_bytes(b'\xff\xfe')
    assert latest_checkpoint(tmp_path / 'work') == (str(here), [])


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / 'epoch_1.pth')
    os.mkfifo(tmp_path / 'epoch_2.pth')
    (tmp_path / 'epoch_3.pth').symlink_to('gone.pth')
    (tmp_path / 'epoch_4.pth').mkdir()
    latest, passed_over = latest_checkpoint(tmp_path)
    assert latest == str(good)
    assert len(passed_over) == 3
    assert any('is not a regular file' in sentence for sentence in passed_over)


@pytest.mark.parametrize('kind', ['truncated', 'empty', 'flipped'])
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    good = checkpoint(tmp_path / 'epoch_1.pth')
    bad = checkpoint(tmp_path / 'epoch_2.pth', 4)
    damage(bad, kind)
    latest, passed_over = latest_checkpoint(tmp_path)
    assert latest == str(good)
    (sentence,) = passed_over
    assert sentence.startswith(f"'{bad}' is damaged")
    if kind == 'flipped':
        # torch itself reads it without a word.
        assert torch.load(bad, weights_only=True)['state_dict']['w'].shape == (1000,)


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    for changes in (dict(message_hub=None), dict(meta=None), dict(state_dict=None)):
        path = checkpoint(tmp_path / 'a.pth', **changes)
        assert why_not_resumable(path).startswith('lacks meta.iter, state_dict or message_hub')


def test_a_run_goes_on_from_the_previous_one(run: Callable) -> None:
    whole = run('train', work_dir='a')
    data = bytearray(Path('a/epoch_2.pth').read_bytes())
    weight = whole.model.linear.weight.detach().numpy().tobytes()
    data[data.index(weight) + 5] ^= 16
    Path('a/epoch_2.pth').write_bytes(data)
    rest = run('train', work_dir='a', resume='auto')
    assert len(rest.model.seen) == 16
    (log,) = [p for p in Path('a').glob('*/*.log') if 'not resumed from' in p.read_text()]
    assert f"not resumed from: '{Path('a/epoch_2.pth').resolve()}' is damaged" in log.read_text()
    Path('a/epoch_2.pth').write_bytes(data)
    with pytest.raises(ResumeError, match=r"'a/epoch_2\.pth' is damaged.*newest good.*epoch_1"):
        run('train', work_dir='a', resume='a/epoch_2.pth')
    Path('a/epoch_1.pth').write_bytes(b'x')
    with pytest.raises(
        ResumeError, match='to start from the beginning, move them away or omit --resume'
    ):
        run('train', work_dir='a', resume='auto')


@pytest.mark.parametrize('wrong', ['text', 10**40, torch.ones(3), ((),), -5, [4], {1: {2: 3}}])
@pytest.mark.parametrize(
    'entry',
    ['meta.iter', 'meta.epoch', 'meta.seed', 'state_dict', 'optimizer', 'param_schedulers'],
)
def test_a_crafted_entry_is_named(entry: str, wrong: object, tmp_path: Path) -> None:
    """Each was a traceback from deep inside of a resume."""
    key, _, name = entry.partition('.')
    value = dict(epoch=1, iter=2, seed=0) | {name: wrong} if name else wrong
    problem = why_not_resumable(checkpoint(tmp_path / 'a.pth', **{key: value}))
    fits = (entry, type(wrong)) == ('param_schedulers', dict) or (
        entry in ('meta.iter', 'meta.epoch') and isinstance(wrong, int) and wrong > 0
    )
    if not fits:
        assert problem.startswith((f'has another {entry} than', 'lacks meta.iter'))
    group = dict(params=[0], lr=0.1)
    crafted = dict(epoch=1, iter=2, settings={1: {2: 3}})
    problem = why_not_resumable(checkpoint(tmp_path / 'd.pth', meta=crafted))
    assert problem.startswith('has another meta.settings than')
    whole = dict(optimizer=dict(state={}, param_groups=[group]), param_schedulers=[{}])
    assert why_not_resumable(checkpoint(tmp_path / 'b.pth', **whole)) is None
    several = dict(optimizer=dict(a=whole['optimizer']), param_schedulers=dict(a=[{}]))
    assert why_not_resumable(checkpoint(tmp_path / 'c.pth', **several)) is None


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('resume_data_seed', 'x'),
        ('resume_data_seed', 2**32),
        ('resume_data_seed', None),
        ('resume_shape', 5),
        ('resume_shape', {'images': [1]}),
        ('resume_validated', -1),
        ('best_score', 'z'),
        ('best_score_mAP', None),
        ('keep_ckpt_ids', 3),
        (RUN_ID, 7),
        (5, 1),
    ],
)
def test_a_crafted_message_hub_is_named(name: object, value: object, tmp_path: Path) -> None:
    hub = dict(runtime_info={name: value}, log_scalars={}, resumed_keys={})
    problem = why_not_resumable(checkpoint(tmp_path / 'a.pth', message_hub=hub))
    entry = f'runtime_info.{name}' if isinstance(name, str) else 'runtime_info'
    assert problem.startswith(f'has another message_hub.{entry} than a training writes')
    for part in ('log_scalars', 'resumed_keys'):
        path = checkpoint(tmp_path / 'a.pth', message_hub={**hub, 'runtime_info': {}, part: [name]})
        assert why_not_resumable(path).startswith(f'has another message_hub.{part} than')


@pytest.mark.parametrize(
    ('here', 'message'),
    [
        ('same', None),
        ('other', r"'beta' \(rank 1\) has another file by the name of '.*epoch_1\.pth'"),
        ('flipped', r"'beta' \(rank 1\) has '.*epoch_1\.pth', which is damaged"),
    ],
)
def test_all_nodes_must_have_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, message: str | None
) -> None:
    """Seen from rank 1, which is told what rank 0 has; without one, see test_several_nodes.py."""
    path = checkpoint(tmp_path / 'epoch_1.pth')
    first = ("node 'alpha' (rank 0)", (file_digest(path), ''))
    if here == 'other':
        checkpoint(path, state_dict={'w': torch.zeros(1000)})
    damage(path, here)
    monkeypatch.setattr(resume, 'get_rank', lambda: 1)
    monkeypatch.setattr(resume.socket, 'gethostname', lambda: 'beta')
    monkeypatch.setattr(resume, 'all_gather_object', lambda own: [first, own])
    error = nullcontext() if message is None else pytest.raises(ResumeError, match=message)
    with error:
        resume._require_same(str(path), str(tmp_path))
