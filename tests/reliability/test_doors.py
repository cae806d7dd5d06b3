"""The two doors of the reliability package, protect_config and protect_runner."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import DataError, ResumeError, UsageError
from mmvttt.openmmlab import registry as registries
from mmvttt.openmmlab.apis import train


def digests(folder: str) -> dict[str, str]:
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in Path(folder).rglob('*')
        if p.is_file()
    }


HOLD = """
import time
from mmvttt.openmmlab.reliability.run_lock import RunLock
lock = RunLock('a')
print('locked', flush=True)
time.sleep(600)
"""
REFUSED = {
    'resume': (dict(resume='a/epoch_9.pth'), UsageError, 'no checkpoint'),
    'damaged': (dict(resume='a/epoch_1.pth'), ResumeError, 'damaged'),
    'batch': (
        dict(resume='a/epoch_1.pth', cfg_options={'train_dataloader.batch_size': 2}),
        ResumeError,
        'images of a batch: 4, now 2',
    ),
    'data': (
        dict(cfg_options={'train_dataloader.dataset.data_root': '/nowhere'}),
        DataError,
        'data is missing',
    ),
}


def test_a_refused_training_changes_no_byte(run: Callable) -> None:
    run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    good = Path('a/epoch_1.pth').read_bytes()
    Path('a/.epoch_1.pth.77.partial').write_bytes(b'being written')
    for kind, (options, error, message) in REFUSED.items():
        damaged = bytearray(good)
        damaged[len(damaged) // 2] ^= 255
        Path('a/epoch_1.pth').write_bytes(damaged if kind == 'damaged' else good)
        # What is built before it is compared with a checkpoint writes folders of logs.
        before = {k: v for k, v in digests('a').items() if k.count('/') == 1 or kind != 'batch'}
        with pytest.raises(error, match=message):
            run('train', work_dir='a', **options)
        after = {k: v for k, v in digests('a').items() if k.count('/') == 1 or kind != 'batch'}
        assert after == before, kind
    before = {k: v for k, v in digests('a').items() if k != 'a/.lock'}
    with subprocess.Popen([sys.executable, '-c', HOLD], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b'locked\n'
        try:
            held = f'another training.*process {other.pid} on .*--work-dir'
            with pytest.raises(UsageError, match=held):
                run('train', work_dir='a')
        finally:
            other.kill()
    assert {k: v for k, v in digests('a').items() if k != 'a/.lock'} == before


def test_the_folder_is_locked_before_anything_is_built(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another training could begin and end in it meanwhile."""
    build, others = train.build_runner, []

    def build_beside_another(cfg: Config) -> object:
        command = [sys.executable, '-c', HOLD]
        others.append(subprocess.run(command, capture_output=True, text=True, timeout=300))
        return build(cfg)

    monkeypatch.setattr(train, 'build_runner', build_beside_another)
    # By a link, whose target is another program's.
    Path('a').mkdir()
    Path('precious').write_text('mine')
    Path('a/.lock').symlink_to(Path('precious').absolute())
    run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    assert f'process {os.getpid()} on' in others[0].stderr
    assert Path('precious').read_text() == 'mine'


def test_a_forgotten_resume_is_a_warning(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        'mmvttt.openmmlab.reliability.protect.print_log', lambda text, *_: messages.append(text)
    )
    for options in ({}, dict(resume='auto'), {}):
        run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1}, **options)
    (warning,) = [text for text in messages if 'earlier training' in text]
    assert 'epoch_1.pth' in warning
    assert '--resume' in warning


def test_links_in_the_folder_are_not_followed(run: Callable) -> None:
    names = ['last_checkpoint', 'epoch_1.pth', 'tiny_config.py', 'best_mse_epoch_1.pth']
    Path('a').mkdir()
    for name in names:
        Path(f'precious_{name}').write_text('mine')
        Path('a', name).symlink_to(Path(f'precious_{name}').absolute())
    options = {
        'train_cfg.max_epochs': 1,
        'default_hooks.checkpoint.save_best': 'mse',
        'default_hooks.checkpoint.rule': 'less',
    }
    run('train', work_dir='a', cfg_options=options)
    for name in names:
        assert Path(f'precious_{name}').read_text() == 'mine', name
        assert not Path('a', name).is_symlink()


# Warnings that a training may log.
WARNINGS = (
    # mmengine's, of a metric without a prefix and of its own deprecated options.
    'The prefix is not set in metric class',
    '"FileClient" will be deprecated in future',
    '"HardDiskBackend" is the alias of "LocalBackend"',
    # The recipe's batch is larger than this one's.
    'the learning rate 0.05 is meant for 8 images a step',
)


def test_the_log_of_a_training_has_no_other_warning(run: Callable) -> None:
    run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    (log,) = Path('a').glob('*/*.log')
    lines = [line for line in log.read_text().splitlines() if ' - WARNING - ' in line]
    assert lines
    for line in lines:
        assert line.partition(' - WARNING - ')[2].startswith(WARNINGS), line


def test_no_registry_asks_to_install_mmvttt(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine does, of a registry without modules to import."""
    texts: list[str] = []
    monkeypatch.setattr('mmengine.logging.print_log', lambda text, *_, **__: texts.append(text))
    for registry in vars(registries).values():
        if isinstance(registry, registries.OwnRegistry):
            monkeypatch.setattr(registry, '_imported', False)
            registry.import_from_location()
            assert registry.get('NoSuchType') is None
    assert not [text for text in texts if 'install' in text]
