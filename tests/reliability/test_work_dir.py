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
    with pytest.raises(UsageError, match=r"/a' \(File exists\): give another --work-dir"):
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
    assert "/disk/a' (Read-only file system)" in output
    assert output.endswith('status 1\n')
    assert 'Traceback' not in output
