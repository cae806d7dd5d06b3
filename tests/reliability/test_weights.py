"""The weights that a training starts from, and heads for other classes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mmvttt.errors import CheckpointError
from mmvttt.openmmlab.apis.train import summary
from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.reliability.weights import (
    FitHeads,
    remove_checkpoints,
    warning_of_random_weights,
)

MESA = 'mmvttt://hvit3_t_mesa_in1k'
DEIT = 'timm://deit_tiny_patch16_224.fb_in1k'


@pytest.mark.parametrize(
    ('name', 'options', 'weights', 'backbone'),
    [
        ('maskrcnn_hvit3_t_1x', {}, MESA, None),
        ('maskrcnn_hvit3_t_1x', {'model.backbone.init_cfg': None}, 'random', 'model.backbone'),
        ('maskrcnn_vittt_s_1x', {}, 'random', 'model.backbone.backbone'),
        ('maskrcnn_vittt_s_1x', {'load_from': 'a.pth'}, 'a.pth', None),
        ('upernet_vit3_s_160k', {}, 'mmvttt://vit3_s_in1k', None),
        # The backbone and the head.
        ('t5_t_in1k_30e', {}, DEIT, None),
        ('t5_t_in1k_30e', {'pretrained': False}, 'random', None),
        # Meant to start from random weights.
        ('vittt_t_in1k', {}, 'random', None),
        ('upernet_vittt_t_camvid', {}, 'random', None),
    ],
)
def test_where_weights_come_from(
    name: str, options: dict[str, Any], weights: str, backbone: str | None
) -> None:
    cfg = load_config(name, cfg_options=options)
    if cfg.get('pretrained') is False:
        remove_checkpoints(cfg.model)
    source = cfg.get('load_from')
    runner: Any = SimpleNamespace(
        cfg=cfg, model=nn.Identity(), work_dir='w', _resume=False, _load_from=source
    )
    rows = dict(line.split(maxsplit=1) for line in summary(runner).splitlines())
    assert rows['weights'] == weights
    warning = warning_of_random_weights(cfg, source)
    assert (warning is None) == (backbone is None)
    assert f' {backbone}.init_cfg.checkpoint=' in (warning or ' None.init_cfg.checkpoint=')


def test_missing_weights_stop_a_training_before_it_builds_anything(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MMVTTT_WEIGHTS', '.')
    # A TinyModel cannot be built with it.
    options = {'model.init_cfg': dict(type='Pretrained', checkpoint=MESA)}
    with pytest.raises(CheckpointError):
        run('train', cfg_options=options)
    with pytest.raises(CheckpointError):
        run('train', cfg_options={'load_from': 'a.pth'})
    options = {'load_from': 'a.pth', 'pretrained': False, 'train_cfg.max_epochs': 1}
    assert run('train', cfg_options=options).iter == 4


class Heads(nn.Module):
    """Heads of a Mask R-CNN for a number of classes, and one with three anchors."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc_cls = nn.Linear(2, classes + 1)
        self.fc_reg = nn.Linear(2, 4 * classes)
        self.logits = nn.Conv2d(2, classes, 1)
        self.anchors = nn.Linear(2, 3 * classes)


def test_classes_of_the_same_name_keep_their_heads() -> None:
    saved, classes = ('dog', 'person', 'cat'), ('wolf', 'cat')
    source, model = Heads(3).state_dict(), Heads(2)
    logged: list[str] = []
    dataset = SimpleNamespace(metainfo=dict(classes=classes))
    runner: Any = SimpleNamespace(
        model=model,
        _resume=False,
        _load_from='coco.pth',
        train_dataloader=SimpleNamespace(dataset=dataset),
        logger=SimpleNamespace(info=logged.append),
    )
    checkpoint = dict(state_dict=dict(source), meta=dict(dataset_meta=dict(classes=saved)))
    FitHeads().after_load_checkpoint(runner, checkpoint)
    got, fresh = checkpoint['state_dict'], model.state_dict()
    for name in ('fc_cls.weight', 'fc_cls.bias', 'logits.weight', 'logits.bias'):
        assert torch.equal(got[name][0], fresh[name][0])
        assert torch.equal(got[name][1], source[name][2])
    assert torch.equal(got['fc_cls.weight'][2], source['fc_cls.weight'][3])
    assert torch.equal(got['fc_reg.weight'][:4], fresh['fc_reg.weight'][:4])
    assert torch.equal(got['fc_reg.weight'][4:], source['fc_reg.weight'][8:])
    assert torch.equal(got['anchors.weight'], fresh['anchors.weight'])
    model.load_state_dict(got)
    (line,) = logged
    assert 'keep the weights of cat; the heads are new for wolf;' in line
    assert line.endswith('shape: anchors.weight, anchors.bias')
