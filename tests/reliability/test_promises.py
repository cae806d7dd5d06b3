"""What a resume reads of a file's hooks and schedules, and where a training ends and writes."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import EarlyStoppingHook, Hook

from mmvttt.checkpoints.locks import locked
from mmvttt.errors import ResumeError, UsageError
from mmvttt.openmmlab.compat.checkpoints import load_safely
from mmvttt.openmmlab.reliability.hook_state import HookStates
from mmvttt.openmmlab.reliability.resume import latest_checkpoint
from mmvttt.openmmlab.reliability.run_lock import RunLock

from ..trainings.ends import BEST
from .test_resume import checkpoint, damage


class Counts(Hook):
    def load_state_dict(self, state: dict) -> None:
        self.count = state['count']

    def state_dict(self) -> dict:
        return {'count': self.count}


def test_a_file_sets_only_plain_values_that_a_hook_has() -> None:
    warnings: list[str] = []
    hook = EarlyStoppingHook(monitor='x', rule='less', patience=3)
    logger = SimpleNamespace(warning=warnings.append)
    runner = SimpleNamespace(hooks=[hook, Counts()], logger=logger)
    before = dict(vars(hook))
    good = dict(wait_count=2, best_score=0.5)
    odd = dict(
        after_val_epoch=5, rule_map={}, patience='x', monitor=5, strict=1, new=3, min_delta=[1]
    )
    HookStates(runner, {'EarlyStoppingHook.1': good | odd, 'A\x1b.1': 3})
    assert vars(hook) == before | good
    assert len(warnings) == len(odd) + 1
    assert not any('\x1b' in text for text in warnings)
    with pytest.raises(ResumeError, match=r'Counts\.1'):
        HookStates(runner, {'Counts.1': {'other': 3}})


def test_schedules_and_rates_of_a_file(run: Callable) -> None:
    """mmengine sets any attribute of a schedule that the checkpoint names."""
    run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    for entry, change in (
        ('param_schedulers', lambda state: state[0].update(step=5)),
        ('param_schedulers', lambda state: state[0].update(last_step='x')),
        ('optimizer', lambda state: state['param_groups'][0].update(lr='x')),
    ):
        content = load_safely('a/epoch_1.pth')
        change(content[entry])
        torch.save(content, 'odd.pth')
        with pytest.raises(ResumeError, match=r'odd\.pth'):
            run('train', work_dir='b', resume='odd.pth')


def test_a_training_that_a_hook_has_stopped_stays_stopped(run: Callable) -> None:
    stop = dict(type='EarlyStoppingHook', monitor='mse', rule='less', stopping_threshold=1e9)
    options = {**BEST, 'train_cfg.max_epochs': 4, 'custom_hooks': [stop]}
    for resume in (None, 'auto', 'auto'):
        assert run('train', work_dir='a', resume=resume, cfg_options=options).epoch == 1
    options['custom_hooks'] = [{**stop, 'stopping_threshold': -1.0}]
    assert run('train', work_dir='a', resume='auto', cfg_options=options).epoch == 4


def test_the_folder_of_checkpoints_is_searched_and_locked(tmp_path: Path) -> None:
    there, pointer = tmp_path / 'there', tmp_path / 'work' / 'last_checkpoint'
    good, last = checkpoint(there / 'epoch_1.pth'), checkpoint(there / 'epoch_2.pth', 4)
    pointer.parent.mkdir()
    pointer.write_text(str(last))
    damage(last, 'truncated')
    assert latest_checkpoint(tmp_path / 'work', str(there))[0] == str(good)
    # Nothing says whose the whole ones are.
    checkpoint(there / 'epoch_3.pth', 6, 'other')
    latest, (_, problem) = latest_checkpoint(tmp_path / 'work', str(there))
    assert latest is None
    assert 'several trainings' in problem


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock would leave a marker, which outlives a killed process."""
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EIO):

        def fails(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, 'flock', fails)
        if number == errno.EIO:
            with pytest.raises(OSError, match=os.strerror(number)):
                locked(tmp_path / 'x')
            continue
        for _ in range(2):
            with pytest.warns(UserWarning, match='cannot be locked'):
                assert not locked(tmp_path / f'{number}').is_locked
        with pytest.warns(UserWarning, match='cannot be locked'):
            RunLock(tmp_path / f'run {number}', tmp_path / 'more').release()
    with pytest.raises(UsageError):
        RunLock(tmp_path)


def test_another_option_of_the_model_is_said(run: Callable, capfd: pytest.CaptureFixture) -> None:
    """One that changes no shape, such as an inner rate, and no option of a training."""
    options = {'train_cfg.max_epochs': 1, 'model.norm': 'SyncBatchNorm'}
    run('train', work_dir='a', cfg_options=options)
    for key, value, said in (('norm', 'BatchNorm1d', True), ('norm', 'SyncBatchNorm', False)):
        capfd.readouterr()
        run('evaluate', 'a/epoch_1.pth', work_dir='b', cfg_options={f'model.{key}': value})
        text = ''.join(capfd.readouterr())
        assert ('trained with other options of the model' in text) is said
        assert ('(here: ' in text and 'BatchNorm1d' in text) is said
