"""Files that are whole, or not there; disks that are full or read-only."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mmengine.fileio import LocalBackend

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import UsageError
from mmvttt.openmmlab.reliability.resume import why_not_resumable

TRAININGS = Path(__file__).parents[1] / 'trainings'
TRAIN = TRAININGS.parents[1] / 'tools' / 'train.py'


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'a.pth'
    write_whole(path, b'old')

    def fail(*_: object) -> None:
        raise OSError('disk full')

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='disk full'):
        write_whole(path, b'new')
    assert path.read_bytes() == b'old'
    assert [p.name for p in tmp_path.iterdir()] == ['a.pth']


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / 'precious'
    precious.write_text('mine')
    (tmp_path / f'.a.pth.{os.getpid()}.partial').symlink_to(precious)
    write_whole(tmp_path / 'a.pth', b'new')
    assert precious.read_text() == 'mine'
    assert (tmp_path / 'a.pth').read_bytes() == b'new'
    assert not (tmp_path / 'a.pth').is_symlink()


def test_mmengine_writes_whole_files(tmp_path: Path) -> None:
    target = tmp_path / 'folder' / 'b.pth'
    LocalBackend().put(b'one', target)
    link = tmp_path / 'link.pth'
    link.symlink_to(target)
    LocalBackend().put(b'two', str(link))
    assert not link.is_symlink()
    assert link.read_bytes() == b'two'
    assert target.read_bytes() != b'two'
    LocalBackend().put_text('ä', tmp_path / 'c.txt', encoding='latin-1')
    assert (tmp_path / 'c.txt').read_bytes() == b'\xe4'


def test_a_work_dir_that_is_a_file(run: Callable) -> None:
    Path('a').touch()
    with pytest.raises(UsageError, match=r"/a', which is not a folder: give another path"):
        run('train', config='noisy', work_dir='a')


def on_a_disk(folder: Path, size: str, script: str) -> str:
    """Output of a shell in `folder`, where `disk` is a small one of its own; skips without one."""
    (folder / 'disk').mkdir()
    train = f'{sys.executable} {TRAIN} {TRAININGS / "noisy_config.py"} --work-dir disk/a'
    mount = f'mount -t tmpfs -o size={size} none disk'
    alone = ['unshare', '--mount', '--map-root-user', 'sh', '-c']
    try:
        subprocess.run([*alone, mount], cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f'no disk can be mounted here: {error}')
    done = subprocess.run(
        [*alone, f'{mount}; TRAIN="{train}"; {script}'],
        cwd=folder,
        env=os.environ | {'PYTHONPATH': str(TRAININGS), 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_read_only_disk(tmp_path: Path) -> None:
    output = on_a_disk(
        tmp_path, '1m', 'mkdir disk/a; mount -o remount,ro disk; $TRAIN; echo status $?'
    )
    assert "/disk/a', which is read-only" in output
    assert output.endswith('status 1\n')
    assert 'Traceback' not in output


@pytest.mark.stress
def test_a_full_disk_does_not_end_a_training(tmp_path: Path) -> None:
    """It ends the last checkpoint of all; with more room the training continues."""
    options = '--cfg-options model.width=1000 train_cfg.max_epochs'
    output = on_a_disk(
        tmp_path,
        '1m',
        f'$TRAIN {options}=8; echo status $?; mount -o remount,size=50m disk; '
        f'$TRAIN --resume {options}=8; echo status $?; ls -A disk/a; cp -r disk/a kept',
    )
    first, second, listed = output.split('status ')
    assert 'no checkpoint could be written to' in first
    assert 'the last good one is' in first
    assert 'Epoch(train) [8]' in first
    assert 'error: the last checkpoint could not be written' in first
    assert second.startswith('1\n')
    assert listed.startswith('0\n')
    assert 'partial' not in listed
    good = list((tmp_path / 'kept').glob('*.pth'))
    assert tmp_path / 'kept' / 'epoch_8.pth' in good
    assert [why_not_resumable(path) for path in good] == [None] * len(good)
