"""The summary of a training's start, advice on layer decay, `--plain`, what the screen shows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from mmvttt.openmmlab.apis.screen import layer_decay_advice, summary
from mmvttt.openmmlab.config import load_config


@pytest.mark.parametrize(
    ('name', 'source', 'weights', 'advice'),
    [
        ('maskrcnn_vittt_s_1x', None, 'random', True),
        ('maskrcnn_vittt_s_1x', 'a.pth', 'a.pth', False),
        # Inherited weights, and a backbone's own.
        ('t5_t_in1k_30e', None, 'random', True),
        (
            'maskrcnn_dinov3_s_linear_1x',
            None,
            'timm://vit_small_patch16_dinov3.lvd1689m',
            False,
        ),
    ],
)
def test_weights_and_advice(name: str, source: str | None, weights: str, advice: bool) -> None:
    for toolbox in ('mmdet', 'mmpretrain'):
        pytest.importorskip(toolbox)
    cfg = load_config(name)
    runner: Any = SimpleNamespace(
        model=nn.Identity(), work_dir='w', _resume=False, _load_from=source
    )
    rows = dict(line.split(maxsplit=1) for line in summary(runner, cfg).splitlines())
    assert rows['weights'] == weights
    assert (layer_decay_advice(runner, cfg) is not None) == advice


def test_plain_leaves_the_config_as_it_is(run: Callable) -> None:
    plain = run('train', work_dir='plain', plain=True, cfg_options={'train_cfg.max_epochs': 1})
    safe = run('train', work_dir='safe', cfg_options={'train_cfg.max_epochs': 1})
    names = [{type(h).__name__: type(h).__module__ for h in r.hooks} for r in (plain, safe)]
    assert 'AnomalyHook' in set(names[1]) - set(names[0])
    assert names[0]['CheckpointHook'].startswith('mmengine')
    assert names[1]['CheckpointHook'].startswith('mmvttt')


def test_the_screen_shows_a_summary_and_the_log_all(
    run: Callable, capfd: pytest.CaptureFixture
) -> None:
    runner = run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    printed = ''.join(capfd.readouterr())
    assert 'model     TinyModel, 0.0 M parameters\nweights   random\nwrites    ' in printed
    (log,) = Path(runner.log_dir).glob('*.log')
    for hidden in ('val_evaluator', 'System environment', 'before_train_epoch'):
        assert hidden not in printed
        assert hidden in log.read_text()
