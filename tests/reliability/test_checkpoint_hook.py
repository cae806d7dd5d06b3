"""Checkpoints on SIGTERM, and a good one on the disk at any moment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mmengine
import pytest
import torch
from mmengine.config import Config

from mmvttt.errors import UsageError
from mmvttt.reliability import AnomalyError, CheckpointHook, Preempted, signals
from mmvttt.reliability.read import read_content
from mmvttt.reliability.resume import latest_checkpoint
from mmvttt.reliability.rotation import Rotation
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
    meta = read_content(path)['meta']
    assert meta['iter'] == 9
    assert meta['mmengine_version'] == mmengine.__version__
    assert meta['mmvttt_version'] == __version__
    # The next regular one takes its place.
    run('train', config='noisy', work_dir='a', resume='auto')
    assert names('a') == {'epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth'}
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize('key', ['mmengine_version', 'mmengine'])
def test_versions_and_the_commit_stand_apart(key: str) -> None:
    """mmengine's Runner, and its FlexibleRunner, append the commit to the version."""
    versions = dict(mmengine_version=mmengine.__version__, mmvttt_version=__version__)
    for commit in ('0123456789' * 4, '', 'unknown'):
        checkpoint = dict(meta={'epoch': 1, key: mmengine.__version__ + commit})
        CheckpointHook().before_save_checkpoint(SimpleNamespace(cfg=Config()), checkpoint)
        own = dict(git_hash=commit) if len(commit) == 40 else {}
        assert checkpoint['meta'] == dict(epoch=1, settings={}, **versions, **own)


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


def test_a_regular_checkpoint_of_this_step_is_enough(run: Callable) -> None:
    options = {
        'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=8),
        'default_hooks.checkpoint': dict(by_epoch=False, interval=4),
        **stop_at(4),
    }
    with pytest.raises(Preempted):
        run('train', config='noisy', work_dir='a', cfg_options=options)
    assert names('a') == {'iter_4.pth'}


def test_accumulated_gradients_are_not_cut_off(run: Callable) -> None:
    options = {'optim_wrapper.accumulative_counts': 4, **stop_at(5)}
    with pytest.raises(Preempted):
        run('train', config='noisy', work_dir='a', cfg_options=options)
    assert names('a') == {'epoch_1.pth', 'iter_8.pth'}
    (log,) = Path('a').glob('*/*.log')
    assert '6 steps apart, no multiple of accumulative_counts=4' in log.read_text()


def test_sigterm_in_a_validation(run: Callable) -> None:
    # The last checkpoint is an epoch old here, and the model holds the averaged weights.
    options = {
        'default_hooks.checkpoint.interval': 2,
        'custom_hooks': [dict(type='EMAHook', momentum=0.1), dict(type='Terminate', val_step=3)],
        'randomness.seed': 0,
    }
    whole = {**options, 'custom_hooks': options['custom_hooks'][:1]}
    run('train', config='noisy', work_dir='whole', cfg_options=whole)
    with pytest.raises(Preempted):
        run('train', config='noisy', work_dir='a', cfg_options=options)
    assert names('a') == {'iter_6.pth'}
    assert read_content('a/iter_6.pth')['meta']['epoch'] == 1
    run('train', config='noisy', work_dir='a', resume='auto', cfg_options=whole)
    assert names('a') == {'epoch_2.pth', 'epoch_3.pth'}
    ends = [read_content(f'{d}/epoch_3.pth') for d in ('a', 'whole')]
    for part in ('state_dict', 'ema_state_dict'):
        for name, value in ends[0][part].items():
            assert torch.equal(value, ends[1][part][name]), name


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
    (log,) = [p for p in Path('a').glob('*/*.log') if 'tries again' in p.read_text()]
    assert 'the last good one is' in log.read_text()
    run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_3.pth'}


@pytest.mark.skipif(sys.platform != 'linux', reason='where workers are forked')
def test_a_worker_whose_trainer_is_killed_while_it_starts_ends() -> None:
    """Its copy of the trainer's output stays open for as long as it lives."""
    script = """
import os, signal, time
from torch.utils.data import DataLoader
from mmvttt.reliability import signals

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


@pytest.mark.parametrize(
    'sent', [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.stress)]
)
def test_a_signal_to_all_processes_saves(
    tmp_path: Path, run: Callable, sent: signal.Signals
) -> None:
    """torchrun, `timeout`, systemd, slurm and Ctrl-C signal the data workers too."""
    options = ['model.seconds=0.02', 'train_cfg.max_epochs=200']
    options += [f'{name}_dataloader.num_workers=2' for name in ('train', 'val')]
    command = [sys.executable, str(TRAIN), str(TRAININGS / 'noisy_config.py'), '--work-dir', 'a']
    process = subprocess.Popen(
        [*command, '--cfg-options', *options],
        cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': str(TRAININGS), 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    pointer = tmp_path / 'a' / 'last_checkpoint'
    try:
        for _ in range(3000):
            if pointer.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        if sent == signal.SIGTERM:
            # Slurm's warning, and the training goes on.
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(1)
        os.killpg(process.pid, sent)
        os.killpg(process.pid, sent)
        out, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert 'Traceback' not in out
    (line,) = [x for x in out.splitlines() if f'{sent.name}: stopped' in x]
    path = Path(pointer.read_text())
    assert path.name.startswith(('iter_', 'epoch_'))
    assert f'stopped with {path}; --resume continues' in line
    step = read_content(path)['meta']['iter']
    runner = run(
        'train',
        config='noisy',
        work_dir=str(tmp_path / 'a'),
        resume='auto',
        cfg_options={'train_cfg.max_epochs': step // 6 + 1},
    )
    assert len(runner.model.seen) == 22 - min(22, 4 * (step % 6))


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
    [
        (lambda t: str(t / 'precious'), lambda t: str(t / 'precious.txt')),
        (lambda t: '/x/..', lambda t: '/x/..'),
        (lambda t: '', lambda t: '.'),
        (lambda t: 'a/best_x_epoch_1.pth', lambda t: 'a/iter_1.pth'),
        (lambda t: ['a'], lambda t: None),
    ],
)
def test_a_resumed_checkpoint_names_no_files_of_others(
    run: Callable, tmp_path: Path, best: Callable, preempted: Callable
) -> None:
    """Files that a checkpoint names as the best, or as preempted, are removed in time."""
    folder, file = tmp_path / 'precious', tmp_path / 'precious.txt'
    folder.mkdir()
    file.write_text('mine')
    # Folders with the names of checkpoints, and other things in them.
    mine = [Path('a', name, 'mine') for name in ('best_x_epoch_1.pth', 'iter_1.pth')]
    for inside in mine:
        inside.mkdir(parents=True)
    run('train', config='noisy', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    content = read_content('a/epoch_1.pth')
    hub = content['message_hub']
    for key, value in {
        'best_ckpt': best(tmp_path),
        'best_score': 1e9,
        'preempted_checkpoint': preempted(tmp_path),
        'keep_ckpt_ids': ['../precious', 1],
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
    assert folder.is_dir()
    assert all(inside.is_dir() for inside in mine)
    assert file.read_text() == 'mine'


def test_weights_that_are_not_finite_are_not_saved(run: Callable) -> None:
    spoil = {'custom_hooks': [dict(type='Spoil', step=12)]}
    with pytest.raises(AnomalyError, match=r'No checkpoint is written.*1 weights.*net\.0\.weight'):
        run('train', config='noisy', work_dir='a', cfg_options=spoil)
    assert names('a') == {'epoch_1.pth'}
    assert run('train', config='noisy', work_dir='a', resume='auto').iter == 18


def test_a_misspelt_option_is_an_error_at_once() -> None:
    with pytest.raises(
        TypeError, match=r'no option max_keep_ckpt; allowed: exit_code.*max_keep_ck'
    ):
        CheckpointHook(interval=1, max_keep_ckpt=3)


def test_what_a_kill_between_two_files_left_is_removed(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = {'default_hooks.checkpoint.max_keep_ckpts': 1}

    class Killed(BaseException):
        """Nothing catches it."""

    def kill(*_: object) -> None:
        raise Killed

    run('train', config='noisy', work_dir='a', cfg_options={**keep, 'train_cfg.max_epochs': 1})
    with monkeypatch.context() as patch:
        patch.setattr(Rotation, 'remove', lambda self, names, *_: list(names) and kill())
        with pytest.raises(Killed):
            run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_1.pth', 'epoch_2.pth'}
    Path('a/.running').unlink()
    run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_3.pth'}
