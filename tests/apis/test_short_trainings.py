"""`--plain`, and what the screen shows of a training."""

from collections.abc import Callable
from pathlib import Path

import pytest


def test_plain_leaves_the_config_as_it_is(run: Callable) -> None:
    plain = run('train', work_dir='plain', plain=True, cfg_options={'train_cfg.max_epochs': 1})
    safe = run('train', work_dir='safe', cfg_options={'train_cfg.max_epochs': 1})
    names = [{type(h).__name__: type(h).__module__ for h in r.hooks} for r in (plain, safe)]
    assert {'AnomalyHook', 'TopologyHook'} <= set(names[1]) - set(names[0])
    assert names[0]['CheckpointHook'].startswith('mmengine')
    assert names[1]['CheckpointHook'].startswith('mmvttt')


def test_the_screen_shows_a_summary_and_the_log_all(
    run: Callable, capfd: pytest.CaptureFixture
) -> None:
    runner = run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    printed = ''.join(capfd.readouterr())
    for shown in ('model     TinyModel', 'data      TinyData', 'schedule  1 epochs, AdamW'):
        assert shown in printed
    (log,) = Path(runner.log_dir).glob('*.log')
    for hidden in ('val_evaluator', 'System environment', 'before_train_epoch'):
        assert hidden not in printed
        assert hidden in log.read_text()


def test_settings_by_parameter_are_a_table(run: Callable, capfd: pytest.CaptureFixture) -> None:
    options = {
        'train_cfg.max_epochs': 1,
        'optim_wrapper.constructor': 'DefaultOptimWrapperConstructor',
        'optim_wrapper.paramwise_cfg': dict(bias_lr_mult=2.0),
    }
    runner = run('train', work_dir='a', cfg_options=options)
    printed = ''.join(capfd.readouterr())
    assert 'Settings by parameter' in printed
    assert 'paramwise_options' not in printed
    (log,) = Path(runner.log_dir).glob('*.log')
    assert 'paramwise_options' in log.read_text()
    # A row for weights and one for biases.
    table = printed.partition('Settings by parameter')[2].partition('└')[0]
    assert len([line for line in table.splitlines() if line.startswith('│')]) == 2
