"""Which checkpoint a run resumes from, and the message where there is none."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmvttt.errors import ResumeError
from mmvttt.reliability.resume import (
    RUN_ID,
    _difference,
    _fingerprint,
    _require_agreement,
    latest_checkpoint,
)
from mmvttt.reliability.resume import why_not_resumable as why_not


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


def test_a_new_training_in_the_folder_of_an_old_one(tmp_path: Path) -> None:
    checkpoint(tmp_path / 'epoch_12.pth', 24, 'old')
    newest = checkpoint(tmp_path / 'epoch_3.pth', 6, 'new')
    (tmp_path / 'last_checkpoint').write_text(str(newest))
    assert latest_checkpoint(tmp_path) == (str(newest), [])


def test_last_checkpoint_may_point_elsewhere(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / 'work' / 'epoch_1.pth', 2)
    there = checkpoint(tmp_path / 'elsewhere' / 'epoch_2.pth', 4)
    pointer = tmp_path / 'work' / 'last_checkpoint'
    pointer.write_text(str(there))
    assert latest_checkpoint(tmp_path / 'work') == (str(there), [])
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
    found, passed_over = latest_checkpoint(tmp_path)
    assert found == str(good)
    assert len(passed_over) == 3
    assert any('is no plain file' in sentence for sentence in passed_over)


@pytest.mark.parametrize('kind', ['truncated', 'empty', 'flipped'])
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    good = checkpoint(tmp_path / 'epoch_1.pth')
    bad = checkpoint(tmp_path / 'epoch_2.pth', 4)
    damage(bad, kind)
    found, passed_over = latest_checkpoint(tmp_path)
    assert found == str(good)
    (sentence,) = passed_over
    assert sentence.startswith(f"'{bad}' is damaged")
    if kind == 'flipped':
        # torch itself reads it without a word.
        assert torch.load(bad, weights_only=True)['state_dict']['w'].shape == (1000,)


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / 'a.pth', message_hub=None, meta=None)
    assert why_not(path) == (
        'has no meta, message_hub: it holds weights to load, not a training to resume'
    )
    torch.save(torch.zeros(3), path)
    assert 'has no meta, state_dict, message_hub' in why_not(path)


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
    with pytest.raises(ResumeError, match='to begin anew, move them away or leave --resume out'):
        run('train', work_dir='a', resume='auto')


def test_the_same_file_everywhere(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / 'a.pth')
    print_ = _fingerprint(str(path))
    copy = str(shutil.copy(path, tmp_path / 'b.pth'))
    assert _difference(copy, print_, thorough=True) is None
    checkpoint(tmp_path / 'b.pth', state_dict={'w': torch.zeros(1000)})
    assert _difference(copy, print_, thorough=True) == f'has another file by the name of {copy!r}'
    damage(path, 'flipped')
    assert 'is damaged' in _difference(str(path), print_, thorough=True)
    path.unlink()
    assert _difference(str(path), print_, thorough=False) == f'lacks {str(path)!r}'


def test_who_lacks_what_is_said() -> None:
    first = ("node 'alpha' (rank 0)", None)
    _require_agreement([first, ("node 'beta' (rank 1)", None)], 'w/epoch_1.pth', 'w')
    lacking = [(f"node 'beta' (rank {r})", "lacks 'w/epoch_1.pth'") for r in range(1, 7)]
    with pytest.raises(ResumeError) as error:
        _require_agreement([first, *lacking], 'w/epoch_1.pth', 'w')
    assert "of node 'alpha' (rank 0), but node 'beta' (rank 1) lacks 'w/epoch_1.pth';" in str(
        error.value
    )
    assert '(and 2 more): copy the file there' in str(error.value)
    elsewhere = ("node 'beta' (rank 4)", "has 'w/epoch_1.pth'")
    with pytest.raises(ResumeError, match=r"'alpha'.*no checkpoint in 'w', but node 'beta'.*NODE_"):
        _require_agreement([first, elsewhere], None, 'w')
