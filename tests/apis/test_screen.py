"""The summary of a training's start, advice on layer decay, `--plain`, what the screen shows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mmengine.config import Config

from mmvttt.openmmlab.apis.screen import layer_decay_advice, summary
from mmvttt.openmmlab.config import load_config


def lines(cfg: Config, resume: bool = False, load_from: str | None = None) -> dict[str, str]:
    """The text of each line of the summary by its first word, and the advice."""
    runner: Any = SimpleNamespace(model=None, work_dir='w', _resume=resume, _load_from=load_from)
    rows = dict(line.split(maxsplit=1) for line in summary(runner, cfg).splitlines())
    return rows | {'advice': layer_decay_advice(runner, cfg)}


def test_random_weights_under_layer_decay() -> None:
    pytest.importorskip('mmdet')
    rows = lines(load_config('maskrcnn_vittt_s_1x'))
    assert rows['weights'] == 'random'
    assert 'are meant for pretrained weights' in rows['advice']
    for named in (dict(load_from='a.pth'), dict(load_from='a.pth', resume=True)):
        rows = lines(load_config('maskrcnn_vittt_s_1x'), **named)
        assert rows['weights'].endswith('a.pth')
        assert rows['advice'] is None
    init = dict(type='Pretrained', checkpoint='b.pth')
    options = {'model.backbone.backbone.init_cfg': init}
    rows = lines(load_config('maskrcnn_vittt_s_1x', cfg_options=options))
    assert rows['weights'] == 'b.pth'
    assert rows['advice'] is None


def test_a_recipe_for_inherited_weights_without_any() -> None:
    pytest.importorskip('mmpretrain')
    assert 'tools/inherit_weights.py' in lines(load_config('t5_t_in1k_30e'))['advice']
    assert lines(load_config('t5_t_in1k_30e'), load_from='inherited.pth')['advice'] is None
    rows = lines(load_config('maskrcnn_dinov3_s_linear_1x'))
    assert rows['weights'] == 'timm://vit_small_patch16_dinov3.lvd1689m'
    assert rows['advice'] is None


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
