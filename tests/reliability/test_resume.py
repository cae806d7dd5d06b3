"""Which checkpoint a run resumes from, and the message where there is none."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmvttt.errors import ResumeError
from mmvttt.openmmlab.compat.checkpoints import load_safely
from mmvttt.openmmlab.reliability import resume
from mmvttt.openmmlab.reliability.resume import RUN_ID, latest_checkpoint, why_not_resumable

from ..trainings.ends import BEST


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
        latest, (problem,) = latest_checkpoint(tmp_path / 'work')
        assert latest == str(here)
        assert 'does not exist' in problem
    pointer.write_bytes(b'\xff\xfe')
    assert latest_checkpoint(tmp_path / 'work')[0] == str(here)


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
    assert sentence.startswith(f"'{bad}' is {'empty' if kind == 'empty' else 'damaged'}")
    if kind == 'flipped':
        # torch itself reads it without a word.
        assert torch.load(bad, weights_only=True)['state_dict']['w'].shape == (1000,)


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    for changes in (dict(message_hub=None), dict(meta=None), dict(state_dict=None)):
        path = checkpoint(tmp_path / 'a.pth', **changes)
        assert why_not_resumable(path).startswith('lacks meta.iter, meta.epoch, state_dict')


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
    with pytest.raises(ResumeError, match=r"'a/epoch_2\.pth' is damaged.*epoch_1"):
        run('train', work_dir='a', resume='a/epoch_2.pth')
    Path('a/epoch_1.pth').write_bytes(b'x')
    with pytest.raises(ResumeError):
        run('train', work_dir='a', resume='auto')


def test_odd_entries(run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """What is only carried is left out with a warning, the rest is an error of this file."""
    run('train', work_dir='a', cfg_options={**BEST, 'train_cfg.max_epochs': 1})
    good = load_safely('a/epoch_1.pth')
    info = good['message_hub']['runtime_info']
    good['meta']['settings'] = {1: {2: 3}}
    odd = dict(best_score='z', resume_validated=None, resume_shape=5, keep_ckpt_ids=3, other=['x'])
    info.update(odd, **{'7': 7})
    info[5] = 1
    torch.save(good, 'odd.pth')
    resumed = run('train', work_dir='b', resume='odd.pth', cfg_options=BEST)
    assert resumed.message_hub.get_info('other') == ['x']
    assert isinstance(resumed.message_hub.get_info('best_score'), float)
    out = ''.join(capsys.readouterr())
    for name in ('best_score', 'resume_validated', 'resume_shape', '5'):
        assert f"'odd.pth': left out message_hub.runtime_info.{name} = " in out.replace(
            str(Path().resolve()) + '/', ''
        )
    for entry in ('state_dict', 'optimizer', 'param_schedulers', 'message_hub', 'meta'):
        for wrong in ('text', torch.ones(3), [4], {1: {2: 3}}):
            torch.save({**good, entry: wrong}, 'odd.pth')
            with pytest.raises(ResumeError, match=r"odd\.pth'"):
                run('train', work_dir='c', resume='odd.pth', cfg_options=BEST)


def test_what_cannot_be_read_is_not_written(run: Callable) -> None:
    """An object that a hook puts into the message hub cost every checkpoint of the training."""
    first = {'train_cfg.max_epochs': 1, 'custom_hooks': [dict(type='Carry')]}
    run('train', config='noisy', work_dir='a', cfg_options=first)
    (log,) = Path('a').glob('*/*.log')
    assert 'WARNING - a_path is not kept in the checkpoint' in log.read_text()
    assert load_safely('a/epoch_1.pth')['message_hub']['runtime_info']['a_number'] == 3
    first['train_cfg.max_epochs'] = 2
    assert run('train', config='noisy', work_dir='a', resume='auto', cfg_options=first).epoch == 2


def test_a_lost_checkpoint_is_not_passed_over_in_silence(run: Callable) -> None:
    for plain in (False, True):
        run('train', work_dir='a', plain=plain)
        for path in Path('a').glob('*.pth'):
            path.unlink()
        with pytest.raises(ResumeError, match=r"'.*epoch_2\.pth'"):
            run('train', work_dir='a', resume='auto', plain=plain)


@pytest.mark.parametrize(
    ('here', 'problem'), [('same', None), ('other', "'epoch_1.pth' ("), ('flipped', 'is damaged')]
)
def test_all_nodes_must_have_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, problem: str | None
) -> None:
    """Seen from rank 1, which is told what rank 0 has; without one, see test_several_nodes.py."""
    path = checkpoint(tmp_path / 'epoch_1.pth')
    first = resume._state(str(path), str(tmp_path))
    if here == 'other':
        checkpoint(path, state_dict={'w': torch.zeros(1000)})
    damage(path, here)
    monkeypatch.setattr(resume, 'get_rank', lambda: 1)
    state = resume._state(str(path), str(tmp_path))
    assert resume._state(str(tmp_path / 'epoch_9.pth'), '').startswith('missing')
    assert (state == first) == (problem is None)
    assert (problem or '') in state
