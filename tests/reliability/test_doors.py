"""protect_config and protect_runner, and the files of a work directory: whole, or not there."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config
from mmengine.fileio import LocalBackend

from mmvttt.checkpoints import atomic_write
from mmvttt.checkpoints.atomic_write import replacing, write_whole
from mmvttt.errors import DataError, ResumeError, UsageError
from mmvttt.openmmlab.apis import train
from mmvttt.outputs import check_new_file

from ..trainings.ends import BEST

SHORT = {'train_cfg.max_epochs': 1}
# A process that looks into its own folder keeps its lock.
HOLD = """
import time
from pathlib import Path
from mmvttt.openmmlab.reliability.run_lock import RunLock
lock = RunLock('a')
Path('a/.lock').read_bytes()
print('locked', flush=True)
time.sleep(600)
"""
BATCH = {'train_dataloader.batch_size': 2}
NOWHERE = {'train_dataloader.dataset.data_root': '/nowhere'}
REFUSED = {
    'resume': (dict(resume='a/epoch_9.pth'), UsageError),
    'damaged': (dict(resume='a/epoch_1.pth'), ResumeError),
    'batch': (dict(resume='a/epoch_1.pth', cfg_options=BATCH), ResumeError),
    'data': (dict(cfg_options=NOWHERE), DataError),
}


def contents() -> dict[str, bytes]:
    """The files of the work directory, but for logs, in folders, and the lock."""
    files = (p for p in Path('a').iterdir() if p.is_file() and '.lock' not in p.name)
    return {p.name: p.read_bytes() for p in files}


def test_a_refused_training_changes_no_byte(run: Callable) -> None:
    run('train', work_dir='a', cfg_options=SHORT)
    good = Path('a/epoch_1.pth').read_bytes()
    Path('a/.epoch_1.pth.77.partial').write_bytes(b'being written')
    for kind, (options, error) in REFUSED.items():
        damaged = bytearray(good)
        damaged[len(damaged) // 2] ^= 255
        Path('a/epoch_1.pth').write_bytes(damaged if kind == 'damaged' else good)
        before = contents()
        with pytest.raises(error):
            run('train', work_dir='a', **options)
        assert contents() == before, kind
    with subprocess.Popen([sys.executable, '-c', HOLD], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b'locked\n'
        try:
            held = f'another training.*process {other.pid} on .*--work-dir'
            with pytest.raises(UsageError, match=held):
                run('train', work_dir='a')
        finally:
            other.kill()
    assert contents() == before


def test_the_folder_is_locked_before_anything_is_built(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another training could begin and end in it meanwhile."""
    build, others = train.build_runner, []

    def build_beside_another(cfg: Config, *options: bool) -> object:
        command = [sys.executable, '-c', HOLD]
        others.append(subprocess.run(command, capture_output=True, text=True, timeout=300))
        return build(cfg, *options)

    monkeypatch.setattr(train, 'build_runner', build_beside_another)
    run('train', work_dir='a', cfg_options=SHORT)
    assert f'process {os.getpid()} on' in others[0].stderr


def test_links_in_the_folder_are_not_followed(run: Callable) -> None:
    names = ['.lock', '.lock_holder', 'last_checkpoint', 'tiny_config.py']
    names += ['epoch_1.pth', 'best_mse_epoch_1.pth']
    Path('a').mkdir()
    for name in names:
        Path(f'precious_{name}').write_text('mine')
        Path('a', name).symlink_to(Path(f'precious_{name}').absolute())
    run('train', work_dir='a', cfg_options={**SHORT, **BEST})
    for name in names:
        assert Path(f'precious_{name}').read_text() == 'mine', name
        assert not Path('a', name).is_symlink()


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='a folder that even root cannot write')
@pytest.mark.parametrize('folder', ['file', '/proc/x'])
def test_a_folder_that_cannot_be_written(run: Callable, folder: str) -> None:
    Path('file').touch()
    with pytest.raises(UsageError):
        run('train', work_dir=folder)


# Warnings that a training may log.
WARNINGS = (
    # mmengine's, of a metric without a prefix and of its own deprecated options.
    'The prefix is not set in metric class',
    '"FileClient" will be deprecated in future',
    '"HardDiskBackend" is the alias of "LocalBackend"',
    # The recipe's batch is larger than this one's.
    'the learning rate 0.05 is meant for 8 images a step',
)


def test_warnings_of_a_training(run: Callable) -> None:
    """The one that a resume may have been forgotten; no other in a first training."""
    for options in ({}, dict(resume='auto'), {}):
        run('train', work_dir='a', cfg_options=SHORT, **options)
    lines = [line for log in Path('a').glob('*/*.log') for line in log.read_text().splitlines()]
    texts = [line.partition(' - WARNING - ')[2] for line in lines]
    (warning,) = [text for text in texts if text and not text.startswith(WARNINGS)]
    assert 'checkpoints of an earlier training (epoch_1.pth)' in warning
    assert '--resume' in warning


@pytest.mark.parametrize(('free', 'kind'), [(1, RuntimeError), (0, OSError)])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[Exception]
) -> None:
    """torch's error says nothing of a full disk."""
    path = tmp_path / 'a.pth'
    write_whole(path, b'old')
    monkeypatch.setattr(atomic_write, 'disk_usage', lambda _: SimpleNamespace(free=free))
    with pytest.raises(kind) as error, replacing(path):
        raise RuntimeError('unexpected pos')
    assert getattr(error.value, 'errno', errno.ENOSPC) == errno.ENOSPC
    assert path.read_bytes() == b'old'
    assert [p.name for p in tmp_path.iterdir()] == ['a.pth']


@pytest.mark.parametrize('path', ['/proc/x.onnx', 'file/x.onnx', 'none/x.onnx', 'file', '.'])
def test_a_result_is_tried_before_the_work(path: str) -> None:
    Path('file').touch()
    if path in ('file', 'none/x.onnx'):
        check_new_file(path)
    else:
        with pytest.raises(UsageError):
            check_new_file(path)
    assert os.listdir() == ['file']


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
