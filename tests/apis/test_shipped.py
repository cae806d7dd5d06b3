"""Shipped weights in OpenMMLab: `mmvttt://NAME` in configs and loaders."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint

import mmvttt
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import open_checkpoint
from mmvttt.openmmlab.config import building, config_names, load_config
from mmvttt.openmmlab.registry import MODELS
from mmvttt.openmmlab.reliability.weights import checkpoints_of

NAME = 'cifar10_vittt_nano'


@pytest.fixture(autouse=True)
def scope() -> None:
    init_default_scope('mmpretrain')


@pytest.mark.parametrize('name', ['cifar10_vit_nano', 'cifar10_vittt_nano'])
def test_mmengine_takes_the_name(name: str) -> None:
    model = MODELS.build(load_config(name).model)
    content = load_checkpoint(model, f'mmvttt://{name}', strict=True)
    weights = open_checkpoint(f'mmvttt://{name}').weights()
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key].float()), key
    assert content['meta']['dataset_meta']['classes'][3] == 'cat'


def test_the_source_of_a_linear_model_comes_with_the_package() -> None:
    """Without a download: `cifar10_vit_linear_nano` and `cifar10_vit_distil_nano`."""
    config = load_config('cifar10_vit_linear_nano')
    model = MODELS.build(config.model)
    record = load_pretrained(model, config.load_from)
    assert record.missing
    assert all('.attn.' in missing for missing in record.missing)
    source = MODELS.build(load_config('cifar10_vit_distil_nano').model)
    source.init_weights()
    for part in (source.backbone, source.source):
        weights = open_checkpoint('mmvttt://cifar10_vit_nano').weights()
        assert torch.equal(
            part.blocks[5].mlp.fc1.weight, weights['backbone.blocks.5.mlp.fc1.weight'].float()
        )


@pytest.mark.parametrize('name', [n for n in config_names() if 'nano' in n or 'demo' in n])
def test_trainings_start_from_weights_that_come_with_the_package(name: str) -> None:
    config = load_config(name)
    with building(config):
        model = MODELS.build(config.model)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model.init_weights()
    sources = [*checkpoints_of(config.model), *filter(None, [config.get('load_from')])]
    if config.get('load_from'):
        load_pretrained(model, config.load_from)
    weights = [open_checkpoint(source).weights() for source in sources]
    learned = [value for file in weights for value in file.values()]
    changed = [v for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    taken = sum(
        any(v.shape == w.shape and torch.equal(v, w.float()) for w in learned) for v in changed
    )
    assert taken > 40 or not sources


def test_threads_load_and_draw() -> None:
    """Models of two toolboxes; each picture is of its own photograph."""
    levels = range(20, 180, 40)
    photographs = [np.full((60 + level, 90, 3), level, np.uint8) for level in levels]
    with ThreadPoolExecutor(4) as pool:
        names = ['pedestrians', NAME] * 2
        models = list(pool.map(lambda name: mmvttt.load(name, device='cpu'), names))
        predictions = [model.predict(photographs, score_thr=0) for model in models[:2]]
        boxes, classes = predictions[0][0], predictions[1][0]
        assert list(boxes.classes) == ['person', 'car']
        assert boxes.masks.shape == (len(boxes.boxes), 80, 90)
        assert {row['label'] for row in classes.rows()} < set(models[1].classes)
        for shown in predictions:
            expected = [one.draw() for one in shown]
            for i, picture in enumerate(pool.map(lambda one: one.draw(), shown * 4)):
                assert np.array_equal(picture, expected[i % len(levels)])
