"""Trainings shorter than their recipe's warm-up, `--plain`, and what the screen shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.config import config_root, load_config

# A warm-up of a fifteenth of the run, then a cosine.
RECIPE = load_config('vittt_t_in1k').param_scheduler


def rates(runner: object) -> list[float]:
    return runner.message_hub.get_scalar('train/lr').data[0].tolist()


@pytest.mark.parametrize('epochs', [1, 20])
def test_the_imagenet_recipe_takes_any_number_of_epochs(run: Callable, epochs: int) -> None:
    options = {
        'train_cfg.max_epochs': epochs,
        'train_cfg.val_interval': 99,
        'param_scheduler': [dict(s) for s in RECIPE],
        'default_hooks.checkpoint': None,
    }
    curve = rates(run('train', work_dir='a', plain=True, cfg_options=options))
    # Four steps an epoch; the rate of 0.05 falls once the warm-up is over.
    assert len(curve) == 4 * epochs
    assert curve.index(max(curve)) <= len(curve) // 10
    assert max(curve) == pytest.approx(0.05, rel=0.05)
    assert curve[-1] < 0.5 * max(curve)


def test_the_finetuning_schedule_takes_any_number_of_epochs(run: Callable) -> None:
    base = Config.fromfile(config_root() / '_base_' / 'adamw_finetune.py')
    options = {
        'train_cfg.max_epochs': 3,
        'param_scheduler': [dict(s) for s in base.param_scheduler],
    }
    curve = rates(run('train', work_dir='a', plain=True, cfg_options=options))
    assert len(curve) == 12
    assert curve[0] == pytest.approx(0.05 * 0.01)


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
