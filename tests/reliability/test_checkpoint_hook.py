"""Checkpoints on signals, and a good one on the disk at any moment."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as worker_module

from mmvttt.openmmlab.compat.checkpoints import load_safely
from mmvttt.openmmlab.reliability import AnomalyError, Preempted, signals
from mmvttt.openmmlab.reliability.resume import latest_checkpoint
from mmvttt.version import __version__

from .. import processes
from ..trainings.ends import BEST

TRAININGS = Path(__file__).parents[1] / 'trainings'
TRAIN = TRAININGS.parents[1] / 'tools' / 'train.py'


def names(folder: str) -> set[str]:
    return {p.name for p in Path(folder).glob('*.pth')}


def stop_at(step: int, sent: str = 'SIGTERM', **options: object) -> dict:
    return {'custom_hooks': [dict(type='Terminate', step=step, sent=sent)], **options}


def test_sigterm_leaves_a_checkpoint_of_this_step(run: Callable) -> None:
    former = signal.getsignal(signal.SIGTERM)
    # What a kill has left in the folder is cleared.
    Path('a').mkdir()
    Path('a/.epoch_1.pth.77.partial').write_bytes(b'half')
    with pytest.raises(Preempted) as stopped:
        run('train', config='noisy', work_dir='a', cfg_options=stop_at(9))
    assert stopped.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is former
    assert names('a') == {'epoch_1.pth', 'iter_9.pth'}
    assert not list(Path('a').glob('*.partial'))
    path, _ = latest_checkpoint('a')
    assert path.endswith('iter_9.pth')
    meta = load_safely(path)['meta']
    assert meta['iter'] == 9
    assert meta['mmvttt_version'] == __version__
    # The next regular one takes its place.
    run('train', config='noisy', work_dir='a', resume='auto')
    assert names('a') == {'epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth'}


@pytest.mark.parametrize(
    ('options', 'status', 'left'),
    [
        # A terminal that closes.
        (stop_at(4, 'SIGHUP', **{'default_hooks.checkpoint.exit_code': 143}), 143, {'iter_4.pth'}),
        # Accumulated gradients are not cut off.
        (
            stop_at(5, **{'optim_wrapper.accumulative_counts': 4}),
            0,
            {'epoch_1.pth', 'iter_8.pth'},
        ),
    ],
)
def test_other_signals_and_updates(run: Callable, options: dict, status: int, left: set) -> None:
    # Where the tests run under nohup it is ignored.
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(Preempted) as stopped:
            run('train', config='noisy', work_dir='a', cfg_options=options)
    finally:
        signal.signal(signal.SIGHUP, former)
    assert stopped.value.code == status
    assert names('a') == left


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
        with pytest.raises(OSError, match='no space'):
            run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_2.pth'}
    run('train', config='noisy', work_dir='a', resume='auto', cfg_options=keep)
    assert names('a') == {'epoch_3.pth'}
    keep.update(
        {'train_cfg.max_epochs': 2, 'default_hooks.checkpoint.filename_tmpl': 'm{:03d}.pth'}
    )
    run('train', config='noisy', work_dir='b', cfg_options=keep)
    assert names('b') == {'m002.pth'}


def test_workers_are_deaf_from_their_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = worker_module.signal_handling._set_worker_signal_handlers

    def prepare_slowly() -> None:
        prepare()
        time.sleep(0.5)

    monkeypatch.setattr(
        worker_module.signal_handling, '_set_worker_signal_handlers', prepare_slowly
    )
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    signals.ignore_signals_in_workers(loader)
    batches = iter(loader)
    (process,) = batches._workers
    time.sleep(0.25)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(process.pid, number)
    assert [int(b) for b in batches] == [0, 1, 2, 3]
    # Persistent ones end with the training.
    assert process.is_alive()
    signals.end_workers(
        SimpleNamespace(_train_loop=SimpleNamespace(dataloader=loader), _val_loop=None)
    )
    process.join(5)
    assert not process.is_alive()


def test_a_signal_to_all_processes_saves(tmp_path: Path) -> None:
    """torchrun, `timeout`, systemd, slurm and Ctrl-C signal the data workers too."""
    config = tmp_path / 'config.py'
    config.write_text(
        f'_base_ = {str(TRAININGS / "noisy_config.py")!r}\n'
        'train_dataloader = dict(num_workers=2)\n'
        'val_dataloader = dict(num_workers=2)\n'
        'custom_hooks = [dict(type="EMAHook"), '
        'dict(type="Terminate", step=4, group=True, times=2)]\n'
    )
    env = os.environ | {'PYTHONPATH': f'{TRAININGS}:{os.environ.get("PYTHONPATH", "")}'}
    command = sys.executable, TRAIN, config, '--work-dir', 'a'
    done = processes.run(*command, cwd=tmp_path, env=env, start_new_session=True)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert 'Traceback' not in text
    path = Path((tmp_path / 'a/last_checkpoint').read_text())
    assert f'SIGTERM: stopped with {path}; --resume continues' in text
    assert load_safely(path)['meta']['iter'] == 4


def test_sigusr1_saves_and_goes_on(run: Callable) -> None:
    options = {
        'default_hooks.checkpoint.interval': 10,
        'default_hooks.checkpoint.save_last': False,
        'train_cfg.max_epochs': 2,
    }
    options = stop_at(4, 'SIGUSR1', **options)
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
    options = {**BEST, 'default_hooks.checkpoint.max_keep_ckpts': 1}
    runner = run('train', config='noisy', work_dir='a', resume='auto', cfg_options=options)
    assert runner.message_hub.get_info('best_score') < 1e9
    assert {file.read_text() for file in (*mine, Path('precious.txt'))} == {'mine'}


@pytest.mark.parametrize('average', [False, True])
def test_weights_that_are_not_finite_are_not_saved(run: Callable, average: bool) -> None:
    where = 'In the averaged weights: ' if average else '1 weights'
    spoil = dict(type='Spoil', step=12, average=average)
    hooks = {'custom_hooks': [dict(type='EMAHook', momentum=0.1), spoil]}
    with pytest.raises(AnomalyError, match=rf'{where}.*net\.0\.weight'):
        run('train', config='noisy', work_dir='a', cfg_options=hooks)
    assert names('a') == {'epoch_1.pth'}
