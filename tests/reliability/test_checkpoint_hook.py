"""Checkpoints on SIGTERM, and a good one on the disk at any moment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as worker_module

from mmvttt.errors import UsageError
from mmvttt.openmmlab.compat.checkpoints import load_safely
from mmvttt.openmmlab.reliability import AnomalyError, CheckpointHook, Preempted, signals
from mmvttt.openmmlab.reliability.resume import latest_checkpoint
from mmvttt.version import __version__

TRAININGS = Path(__file__).parents[1] / 'trainings'
TRAIN = TRAININGS.parents[1] / 'tools' / 'train.py'


def names(folder: str) -> set[str]:
    return {p.name for p in Path(folder).glob('*.pth')}


def stop_at(step: int = 0, val_step: int = 0) -> dict:
    return {'custom_hooks': [dict(type='Terminate', step=step, val_step=val_step)]}


def test_sigterm_leaves_a_checkpoint_of_this_step(run: Callable) -> None:
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as stopped:
        run('train', config='noisy', work_dir='a', cfg_options=stop_at(9))
    assert stopped.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is former
    assert names('a') == {'epoch_1.pth', 'iter_9.pth'}
    path, _ = latest_checkpoint('a')
    assert path.endswith('iter_9.pth')
    meta = load_safely(path)['meta']
    assert meta['iter'] == 9
    assert meta['mmvttt_version'] == __version__
    # The next regular one takes its place.
    run('train', config='noisy', work_dir='a', resume='auto')
    assert names('a') == {'epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth'}
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_terminal_that_closes_leaves_a_checkpoint(run: Callable) -> None:
    """By the exit status of the user's choice; what a kill has left in the folder is cleared."""
    Path('a').mkdir()
    Path('a/.epoch_1.pth.77.partial').write_bytes(b'half')
    # No lock: nothing holds it.
    Path('a/.running').write_text('process 77')
    options = {
        'custom_hooks': [dict(type='Terminate', step=4, sent='SIGHUP')],
        'default_hooks.checkpoint.exit_code': 143,
    }
    # Where the tests run under nohup it is ignored.
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(Preempted) as stopped:
            run('train', config='noisy', work_dir='a', cfg_options=options)
    finally:
        signal.signal(signal.SIGHUP, former)
    assert stopped.value.code == 143
    assert names('a') == {'iter_4.pth'}
    assert [p.name for p in Path('a').glob('.*')] == []


def test_accumulated_gradients_are_not_cut_off(run: Callable) -> None:
    options = {'optim_wrapper.accumulative_counts': 4, **stop_at(5)}
    with pytest.raises(Preempted):
        run('train', config='noisy', work_dir='a', cfg_options=options)
    assert names('a') == {'epoch_1.pth', 'iter_8.pth'}
    (log,) = Path('a').glob('*/*.log')
    assert '6 steps apart, which is not a multiple of accumulative_counts=4' in log.read_text()


def test_the_old_checkpoint_goes_after_the_new_one_has_come(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = {'default_hooks.checkpoint.max_keep_ckpts': 1}
    run('train', config='noisy', work_dir='a', cfg_options={**keep, 'train_cfg.max_epochs': 2})
    assert names('a') == {'epoch_2.pth'}

    def full(*_: object) -> None:
        raise OSError('no space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', full)
        with pytest.raises(UsageError, match=r'last checkpoint could not be written.*no space'):
            run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_2.pth'}
    assert not list(Path('a').glob('.*'))
    (log,) = [p for p in Path('a').glob('*/*.log') if 'retries in' in p.read_text()]
    assert 'the last good one is' in log.read_text()
    run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_3.pth'}


def test_workers_are_deaf_from_their_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = worker_module.signal_handling._set_worker_signal_handlers

    def prepare_slowly() -> None:
        prepare()
        time.sleep(0.5)

    monkeypatch.setattr(
        worker_module.signal_handling, '_set_worker_signal_handlers', prepare_slowly
    )
    loader = DataLoader(range(4), num_workers=1)
    signals.ignore_signals_in_workers(loader)
    batches = iter(loader)
    (process,) = batches._workers
    time.sleep(0.25)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(process.pid, number)
    assert [int(b) for b in batches] == [0, 1, 2, 3]


@pytest.mark.skipif(sys.platform != 'linux', reason='where workers are forked')
def test_a_worker_whose_trainer_is_killed_while_it_starts_ends() -> None:
    """Its copy of the trainer's output stays open for as long as it lives."""
    script = """
import os, signal, time
from torch.utils.data import DataLoader
from mmvttt.openmmlab.reliability import signals

begun, begin = os.pipe()

def start_slowly(worker):
    os.write(begin, b'1')
    time.sleep(0.5)

loader = DataLoader(
    range(4), num_workers=1, worker_init_fn=start_slowly, multiprocessing_context='fork'
)
signals.ignore_signals_in_workers(loader)
batches = iter(loader)
os.read(begun, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, '-c', script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == -signal.SIGKILL


def test_persistent_workers_end_with_the_training() -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    signals.ignore_signals_in_workers(loader)
    (process,) = iter(loader)._workers
    assert process.is_alive()
    signals.end_workers(
        SimpleNamespace(_train_loop=SimpleNamespace(dataloader=loader), _val_loop=None)
    )
    process.join(5)
    assert not process.is_alive()


@pytest.mark.parametrize('where', ['step', 'val_step'])
def test_a_signal_to_all_processes_saves(tmp_path: Path, run: Callable, where: str) -> None:
    """torchrun, `timeout`, systemd, slurm and Ctrl-C signal the data workers too."""
    config = tmp_path / 'config.py'
    config.write_text(
        f'_base_ = {str(TRAININGS / "noisy_config.py")!r}\n'
        'train_dataloader = dict(num_workers=2)\n'
        'val_dataloader = dict(num_workers=2)\n'
        'custom_hooks = [dict(type="EMAHook"), '
        f'dict(type="Terminate", {where}=4, group=True, times=2)]\n'
    )
    done = subprocess.run(
        [sys.executable, str(TRAIN), str(config), '--work-dir', 'a'],
        cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': f'{TRAININGS}:{os.environ.get("PYTHONPATH", "")}'},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert 'Traceback' not in text
    step = 4 if where == 'step' else 6
    path = Path((tmp_path / 'a/last_checkpoint').read_text())
    assert f'SIGTERM: stopped with {path}; --resume continues' in text
    assert load_safely(path)['meta']['iter'] == step


def test_sigusr1_saves_and_goes_on(run: Callable) -> None:
    options = {
        'custom_hooks': [dict(type='Terminate', step=4, sent='SIGUSR1')],
        'default_hooks.checkpoint.interval': 10,
        'default_hooks.checkpoint.save_last': False,
        'train_cfg.max_epochs': 2,
    }
    assert run('train', config='noisy', work_dir='a', cfg_options=options).iter == 12
    assert names('a') == {'iter_4.pth'}


def test_a_second_ctrl_c_ends_at_once(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    # It may follow at once here; two at once are one else, as of a terminal and a launcher.
    options = {'custom_hooks': [dict(type='Terminate', step=8, sent='SIGINT', times=2)]}
    with pytest.raises(Preempted):
        run('train', config='noisy', work_dir='a', cfg_options=options)
    assert names('a') == {'epoch_1.pth', 'iter_8.pth'}
    monkeypatch.setattr(signals, '_SECONDS_OF_A_SIGNAL', 0)
    with pytest.raises(KeyboardInterrupt):
        run('train', config='noisy', work_dir='b', cfg_options=options)
    assert names('b') == {'epoch_1.pth'}


@pytest.mark.parametrize(
    ('best', 'preempted'),
    [('{}/precious', '{}/precious.txt'), ('/x/..', '.'), ('a/best_x_epoch_1.pth', 'a/iter_1.pth')],
)
def test_a_resumed_checkpoint_names_no_files_of_others(
    run: Callable, tmp_path: Path, best: str, preempted: str
) -> None:
    """Files that a checkpoint names as the best, or as preempted, are removed in time."""
    # Folders, some with the names of checkpoints, and other things in them.
    mine = [Path(p, 'mine') for p in ('precious', 'a/best_x_epoch_1.pth', 'a/iter_1.pth')]
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text('mine')
    Path('precious.txt').write_text('mine')
    run('train', config='noisy', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    content = load_safely('a/epoch_1.pth')
    hub = content['message_hub']
    for key, value in {
        'best_ckpt': best.format(tmp_path),
        'best_score': 1e9,
        'preempted_checkpoint': preempted.format(tmp_path),
        'keep_ckpt_ids': ['../precious', 1],
        'outdated_checkpoints': ['../precious.txt', 3],
    }.items():
        hub['runtime_info'][key] = value
        hub['resumed_keys'][key] = True
    torch.save(content, 'a/epoch_1.pth')
    options = {
        'default_hooks.checkpoint.save_best': 'mse',
        'default_hooks.checkpoint.rule': 'less',
        'default_hooks.checkpoint.max_keep_ckpts': 1,
    }
    runner = run('train', config='noisy', work_dir='a', resume='auto', cfg_options=options)
    assert runner.message_hub.get_info('best_score') < 1e9
    assert {file.read_text() for file in (*mine, Path('precious.txt'))} == {'mine'}


@pytest.mark.parametrize(
    ('average', 'message'),
    [
        (False, r'No checkpoint is written.*1 weights.*net\.0\.weight'),
        (True, r'No checkpoint is written.*In the averaged weights: .*net\.0\.weight'),
    ],
)
def test_weights_that_are_not_finite_are_not_saved(
    run: Callable, average: bool, message: str
) -> None:
    spoil = dict(type='Spoil', step=12, average=average)
    hooks = {'custom_hooks': [dict(type='EMAHook', momentum=0.1), spoil]}
    with pytest.raises(AnomalyError, match=message):
        run('train', config='noisy', work_dir='a', cfg_options=hooks)
    assert names('a') == {'epoch_1.pth'}
    assert run('train', config='noisy', work_dir='a', resume='auto').iter == 18


def test_a_misspelt_option_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match=r'no option max_keep_ckpt; allowed: exit_code'):
        CheckpointHook(interval=1, max_keep_ckpt=3)
