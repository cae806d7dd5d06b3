"""The way of the weights of the ImageNet configs into detection, segmentation and timm."""

from pathlib import Path

import pytest
import timm
import torch

import mmvttt.models.timm  # noqa: F401 - registers
from mmvttt.checkpoints import load as checkpoints
from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.checkpoints.read import read_content

from .reduced import PLAIN, build, reduced


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the reduced recipe, as mmengine saves it after a training."""
    cfg = reduced('vittt_t_in1k')
    cfg.model.backbone.img_size, cfg.model.head.num_classes = 64, 2
    content = dict(state_dict=build(cfg).state_dict(), meta=dict(epoch=2), optimizer={})
    path = tmp_path_factory.mktemp('pretrain') / 'epoch_2.pth'
    torch.save(content, path)
    return path


@pytest.mark.parametrize('name', ['maskrcnn_vittt_t_1x', 'upernet_vittt_t_160k'])
def test_pretrained_weights_go_into_detection_and_segmentation(
    pretrained: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = []
    monkeypatch.setattr(
        checkpoints._log, 'log', lambda _, text, *values: logged.append(text % values)
    )
    cfg = reduced(name)
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
