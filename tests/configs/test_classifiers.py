"""The ImageNet configs, and the way of their weights into detection, segmentation and timm."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample

import mmvttt.models.timm  # noqa: F401 - registers
from mmvttt.apis.train import train
from mmvttt.checkpoints import load as checkpoints
from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.models.backbones.vittt import CLASS_TOKENS, POOLING
from mmvttt.registry import MODELS
from mmvttt.reliability.read import read_content

from .reduced import PLAIN

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def classifier(name: str, **backbone) -> tuple[Config, torch.nn.Module]:
    """A config and its model, reduced, for images of 64×64."""
    cfg = Config.fromfile(CONFIGS / f'vittt_{name}_in1k.py')
    init_default_scope('mmpretrain')
    cfg.model.backbone.update(arch=PLAIN, img_size=64, **backbone)
    cfg.model.head.in_channels = 64
    torch.manual_seed(0)
    return cfg, MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))


def batch() -> dict:
    samples = [DataSample().set_gt_label(i) for i in range(4)]
    return dict(inputs=torch.randint(0, 255, (4, 3, 64, 64)).byte(), data_samples=samples)


@pytest.mark.parametrize('name', 'tsb')
def test_reduced_classifier_steps_and_decays_what_it_should(name: str) -> None:
    cfg, model = classifier(name)
    model.init_weights()
    optim = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {names[id(p)]: g for g in optim.optimizer.param_groups for p in g['params']}
    assert {g['lr'] for g in groups.values()} == {1e-3}
    decayed = {n for n, g in groups.items() if g['weight_decay']}
    assert all(groups[n]['weight_decay'] == 0.05 for n in decayed)
    free = re.compile(r'bias|norm|pos_embed|token_scale|\.b0|ln_weight')
    assert {n for n in groups if free.search(n)} == set(groups) - decayed
    model.train()
    loss, _ = model.parse_losses(
        model(**model.data_preprocessor(batch(), training=True), mode='loss')
    )
    optim.update_params(loss)
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        results = model.eval()(**model.data_preprocessor(batch()), mode='predict')
    assert [len(r.pred_score) for r in results] == [1000] * 4


def test_imagenet_recipe_is_the_papers() -> None:
    """App. D: 300 epochs, 1024 images, AdamW 1e-3, weight decay 0.05, 20 epochs of warm-up."""
    cfg = Config.fromfile(CONFIGS / 'vittt_s_in1k.py')
    assert cfg.train_cfg.max_epochs == 300
    assert cfg.auto_scale_lr.base_batch_size == 1024
    assert cfg.train_dataloader.batch_size * 8 == 1024
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-3, 0.05)
    (schedule,) = cfg.param_scheduler
    assert schedule == dict(type='mmvttt.WarmupCosineLR', convert_to_iter_based=True)
    transforms = [t.type for t in cfg.train_dataloader.dataset.pipeline]
    assert {'RandomResizedCrop', 'RandAugment', 'RandomErasing'} <= set(transforms)
    assert [(a.type, a.alpha) for a in cfg.model.train_cfg.augments] == [
        ('Mixup', 0.8),
        ('CutMix', 1.0),
    ]
    assert cfg.model.head.loss.label_smooth_val == 0.1


@pytest.mark.parametrize(('name', 'params'), [('t', 6.976), ('s', 26.365), ('b', 102.385)])
def test_classifiers_have_the_parameters_of_tab_1(name: str, params: float) -> None:
    cfg = Config.fromfile(CONFIGS / f'vittt_{name}_in1k.py')
    init_default_scope('mmpretrain')
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(params, abs=5e-4)


@pytest.mark.parametrize('cls_mode', POOLING + CLASS_TOKENS)
def test_class_tokens_are_one_option(cls_mode: str) -> None:
    _, model = classifier('t', cls_mode=cls_mode)
    assert model.extract_feat(torch.rand(2, 3, 64, 64))[-1].shape == (2, 64)


def test_moving_average_is_one_more_base(tmp_path: Path) -> None:
    path = tmp_path / 'config.py'
    path.write_text("_base_ = ['mmvttt::vittt_t_in1k.py', 'mmvttt::_base_/ema.py']\n")
    cfg = Config.fromfile(path)
    assert [hook.type for hook in cfg.custom_hooks] == ['EMAHook']
    assert cfg.model.backbone.type == 'mmvttt.Vittt'


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
train_dataloader = dict(
    batch_size=3, num_workers=0, persistent_workers=False,
    dataset=dict(type='CustomDataset', _delete_=True, data_root={str(root / 'imagenet')!r},
                 data_prefix='train', pipeline=_base_.train_pipeline))
val_dataloader = dict(
    batch_size=3, num_workers=0, persistent_workers=False,
    dataset=dict(type='CustomDataset', _delete_=True, data_root={str(root / 'imagenet')!r},
                 data_prefix='val', pipeline=_base_.test_pipeline))
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
    monkeypatch.setattr(checkpoints, 'print_log', lambda text, *_: logged.append(text))
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    init_default_scope(cfg.default_scope)
    backbone = cfg.model.backbone
    backbone.backbone.update(
        arch=PLAIN,
        init_cfg=dict(type='Pretrained', checkpoint=str(pretrained), prefix='backbone.'),
    )
    if 'neck' in cfg.model:
        cfg.model.neck.in_channels = [64] * 4
    else:
        cfg.model.decode_head.in_channels = [64] * 4
        cfg.model.auxiliary_head.in_channels = 64
    model = MODELS.build(cfg.model)
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
