"""The summary of a training's start: weights, sizes of images; layer decay of random weights."""

from types import SimpleNamespace
from typing import Any

import pytest
from mmengine.config import Config

from mmvttt.apis.screen import layer_decay_advice, summary
from mmvttt.config import load_config


def lines(cfg: Config, resume: bool = False, load_from: str | None = None) -> dict[str, str]:
    """The text of each line of the summary by its first word, and the advice."""
    runner: Any = SimpleNamespace(model=None, work_dir='w', _resume=resume, _load_from=load_from)
    found = dict(line.split(maxsplit=1) for line in summary(runner, cfg).splitlines())
    return found | {'advice': layer_decay_advice(runner, cfg)}


def test_random_weights_under_layer_decay() -> None:
    pytest.importorskip('mmdet')
    found = lines(load_config('maskrcnn_vittt_s_1x'))
    assert found['weights'] == 'random'
    assert 'RandomChoiceResize (1333, 480) … (1333, 800)' in found['images']
    assert 'is meant for pretrained weights' in found['advice']
    for named in (dict(load_from='a.pth'), dict(load_from='a.pth', resume=True)):
        found = lines(load_config('maskrcnn_vittt_s_1x'), **named)
        assert found['weights'].endswith('a.pth')
        assert found['advice'] is None
    init = dict(type='Pretrained', checkpoint='b.pth')
    options = {'model.backbone.backbone.init_cfg': init}
    found = lines(load_config('maskrcnn_vittt_s_1x', cfg_options=options))
    assert found['weights'] == 'b.pth'
    assert found['advice'] is None


def test_a_recipe_for_inherited_weights_without_any() -> None:
    pytest.importorskip('mmpretrain')
    assert 'tools/inherit_weights.py' in lines(load_config('t5_t_in1k_30e'))['advice']
    assert lines(load_config('t5_t_in1k_30e'), load_from='inherited.pth')['advice'] is None
    found = lines(load_config('maskrcnn_dinov3_s_linear_1x'))
    assert found['weights'] == 'timm://vit_small_patch16_dinov3.lvd1689m'
    assert found['advice'] is None


def test_a_schedule_from_the_start() -> None:
    pytest.importorskip('mmpretrain')
    found = lines(load_config('vittt_s_in1k'))
    assert found['weights'] == 'random'
    assert 'RandomResizedCrop 224' in found['images']
    assert found['advice'] is None
