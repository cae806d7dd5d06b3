"""Shipped weights in OpenMMLab: `mmvttt://NAME` in configs and loaders, by name in inferencers."""

from pathlib import Path

import cv2
import mmpretrain
import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint
from torch import nn

from mmvttt.checkpoints.read import read_weights
from mmvttt.openmmlab.apis.inference import show_images
from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.registry import MODELS

NAME = 'cifar10_vittt_nano'
FILE = f'mmvttt://{NAME}'
CLASSES = tuple(load_config(NAME).classes)


@pytest.fixture(autouse=True)
def scope() -> None:
    init_default_scope('mmpretrain')


def require_loaded(module: nn.Module, prefix: str = '') -> None:
    found = module.state_dict()
    weights = read_weights(FILE)
    assert {f'{prefix}{name}' for name in found} <= set(weights)
    for name, value in found.items():
        assert torch.equal(value, weights[f'{prefix}{name}'].float()), name


def test_init_cfg_takes_the_name() -> None:
    config = load_config(NAME).model.backbone
    config.init_cfg = dict(type='Pretrained', checkpoint=FILE)
    backbone = MODELS.build(config)
    backbone.init_weights()
    require_loaded(backbone, 'backbone.')


def test_mmengine_takes_the_name() -> None:
    model = MODELS.build(load_config(NAME).model)
    content = load_checkpoint(model, FILE, strict=True)
    require_loaded(model)
    assert content['meta']['dataset_meta']['classes'][3] == 'cat'


def test_the_hub_of_mmpretrain_knows_our_models() -> None:
    with torch.device('meta'):
        model = mmpretrain.get_model('vittt_t_in1k')
    assert sum(p.numel() for p in model.parameters()) == 6976240
    assert {'vittt_t_in1k', 'resnet50_8xb32_in1k'} <= set(mmpretrain.list_models())
    require_loaded(mmpretrain.get_model(NAME, pretrained=True))


def test_a_photograph_of_another_size_is_classified(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (75, 110, 3), np.uint8)
    cv2.imwrite(str(tmp_path / 'photo.png'), image)
    (found,) = show_images(load_config(NAME), FILE, [tmp_path / 'photo.png'], tmp_path / 'out')
    assert {line.split()[0] for line in found.lines} < set(CLASSES)
    assert found.picture.is_file()
