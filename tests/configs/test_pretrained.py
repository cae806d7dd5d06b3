"""The way of the weights of the ImageNet configs into detection, segmentation and timm."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import timm
import torch
from mmengine.config import Config

import mmvttt.models.timm  # noqa: F401 - registers
from mmvttt.checkpoints import load as checkpoints
from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.checkpoints.read import read_content
from mmvttt.openmmlab.apis.train import train

from .reduced import PLAIN, build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the real recipe, after an epoch on a dozen images of two classes."""
    root = tmp_path_factory.mktemp('pretrain')
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        for label in ('dark', 'light'):
            folder = root / 'imagenet' / split / label
            folder.mkdir(parents=True)
            for i in range(3):
                image = rng.integers(0, 100, (40, 50, 3)) + (150 if label == 'light' else 0)
                cv2.imwrite(str(folder / f'{i}.png'), image)
    config = root / 'pretrain.py'
    config.write_text(f"""
_base_ = ['mmvttt::vittt_t_in1k.py', 'mmvttt::_base_/ema.py']
model = dict(
    backbone=dict(arch=dict(_delete_=True, **{PLAIN!r}), img_size=64),
    head=dict(in_channels=64, num_classes=2))
data_preprocessor = dict(num_classes=2)
loading = dict(batch_size=3, num_workers=0, persistent_workers=False)
data = dict(type='CustomDataset', _delete_=True, data_root={str(root / 'imagenet')!r})
train_dataloader = dict(
    loading, dataset=dict(data, data_prefix='train', pipeline=_base_.train_pipeline))
val_dataloader = dict(
    loading, dataset=dict(data, data_prefix='val', pipeline=_base_.test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(topk=1)
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=2)
param_scheduler = []
""")
    train(config, work_dir=str(root / 'work'), seed=0)
    return root / 'work' / 'epoch_2.pth'


@pytest.mark.parametrize('name', ['maskrcnn_vittt_t_1x', 'upernet_vittt_t_160k'])
def test_pretrained_weights_go_into_detection_and_segmentation(
    pretrained: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = []
    monkeypatch.setattr(
        checkpoints._log, 'log', lambda _, text, *values: logged.append(text % values)
    )
    cfg = reduce_model(Config.fromfile(CONFIGS / f'{name}.py'))
    cfg.model.backbone.backbone.init_cfg = dict(
        type='Pretrained', checkpoint=str(pretrained), prefix='backbone.'
    )
    model = build(cfg)
    model.init_weights()
    source = read_content(pretrained)['state_dict']
    for key, value in model.backbone.backbone.state_dict().items():
        if key != 'pos_embed':
            assert torch.equal(value, source[f'backbone.{key}']), key
    # Stored for 64×64, wanted for 224×224: resized, not left random.
    position = model.backbone.backbone.pos_embed.mean()
    torch.testing.assert_close(position, source['backbone.pos_embed'].mean(), rtol=0, atol=0.005)
    (report,) = logged
    # The adapter has no use for the classifier's final norm, and reports it.
    assert '2 unexpected: norm.weight, norm.bias' in report
    assert 'missing' not in report
    assert 'mismatched' not in report


def test_pretrained_weights_go_into_timm(pretrained: Path) -> None:
    model = timm.create_model(
        'vittt_tiny_patch16_224',
        arch=PLAIN,
        img_size=64,
        num_classes=2,
        # timm reads tensors alone, not the log of a training.
        checkpoint_path=str(publish_checkpoint(pretrained, pretrained.with_name('timm.pth'))),
    )
    source = read_content(pretrained)['state_dict']
    assert torch.equal(model.head.fc.weight, source['head.fc.weight'])
    assert torch.equal(model.backbone.blocks[1].mixer.w0, source['backbone.blocks.1.mixer.w0'])
