"""The weights that a training starts from, and heads for other classes."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mmengine import hooks
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.runner import get_priority
from torch import nn

from mmvttt.errors import CheckpointError
from mmvttt.openmmlab.apis.export import exportable
from mmvttt.openmmlab.apis.train import summary
from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.engine.hooks.ema import EMAHook
from mmvttt.openmmlab.export.networks import samples_of
from mmvttt.openmmlab.reliability.weights import (
    FitHeads,
    remove_checkpoints,
    warning_of_random_weights,
)
from mmvttt.openmmlab.tasks import task_of

from ..configs.reduced import THIN, build
from ..export.test_networks import classifier, dino, mask_rcnn, segmentor

MESA = 'mmvttt://hvit3_t_mesa_in1k'
DEIT = 'mmvttt://deit_t_in1k'


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
    options = {'model.init_cfg': dict(type='Pretrained', checkpoint=MESA)}
    with pytest.raises(CheckpointError):
        run('train', cfg_options=options)
    with pytest.raises(CheckpointError):
        run('train', cfg_options={'load_from': 'a.pth'})
    options = {'load_from': 'a.pth', 'pretrained': False, 'train_cfg.max_epochs': 1}
    assert run('train', cfg_options=options).iter == 4


def fitted(
    cfg: Config | None,
    model: nn.Module,
    weights: dict,
    saved: Sequence[str],
    classes: Sequence[str],
    name: str = 'w',
) -> tuple[dict, str]:
    """The weights as they are fitted to a config's model, and what is said."""
    logged: list[str] = []
    dataset = SimpleNamespace(metainfo=dict(classes=classes))
    runner: Any = SimpleNamespace(
        cfg=cfg,
        model=model,
        _resume=False,
        _load_from=name,
        train_dataloader=SimpleNamespace(dataset=dataset),
        logger=SimpleNamespace(info=logged.append),
    )
    meta = dict(dataset_meta=dict(classes=saved)) if saved else {}
    checkpoint = dict(state_dict=dict(weights), meta=meta)
    FitHeads().after_load_checkpoint(runner, checkpoint)
    (line,) = logged
    return checkpoint['state_dict'], line


def test_classes_of_the_same_name_keep_their_heads() -> None:
    saved, classes = ('dog', 'person', 'cat'), ('wolf', 'cat')
    models, cfg = [], mask_rcnn()
    for names in (saved, classes):
        for head in (cfg.model.roi_head.bbox_head, cfg.model.roi_head.mask_head):
            head.num_classes = len(names)
        models.append(build(copy.deepcopy(cfg)))
    source, model = models[0].state_dict(), models[1]
    weights = source | {'rpn_head.rpn_cls.bias': torch.ones(7)}
    got, line = fitted(cfg, model, weights, saved, classes)
    fresh = model.state_dict()
    box, mask = 'roi_head.bbox_head.fc', 'roi_head.mask_head.conv_logits'
    for name in (f'{box}_cls.weight', f'{box}_cls.bias', f'{mask}.weight', f'{mask}.bias'):
        assert torch.equal(got[name][0], fresh[name][0])
        assert torch.equal(got[name][1], source[name][2])
    assert torch.equal(got[f'{box}_cls.weight'][2], source[f'{box}_cls.weight'][3])
    assert torch.equal(got[f'{box}_reg.weight'][:4], fresh[f'{box}_reg.weight'][:4])
    assert torch.equal(got[f'{box}_reg.weight'][4:], source[f'{box}_reg.weight'][8:])
    assert torch.equal(got['rpn_head.rpn_cls.bias'], fresh['rpn_head.rpn_cls.bias'])
    model.load_state_dict(got)
    assert 'keep the weights of cat; the heads are new for wolf;' in line
    assert line.endswith('shape: rpn_head.rpn_cls.bias')


def test_rows_of_a_model_without_a_config_go_by_name() -> None:
    """Those of a head with as many rows as classes, or one more."""
    model = nn.ModuleDict(dict(backbone=nn.Linear(2, 2), fc_cls=nn.Linear(2, 3)))
    state = model.state_dict()
    got, line = fitted(None, model, state, ['cat', 'dog'], ['dog', 'cat'])
    assert line == 'w: the heads keep the weights of dog, cat'
    assert torch.equal(got['backbone.weight'], state['backbone.weight'])
    assert torch.equal(got['fc_cls.bias'], state['fc_cls.bias'][[1, 0, 2]])


def test_only_the_head_of_a_model_of_timm_has_rows_of_classes() -> None:
    """It has as many classes as channels."""
    model = dict(type='TimmClassifier', model_name='vit_tiny_patch16_224', depth=1, num_classes=192)
    cfg = Config(dict(default_scope='mmpretrain', model=model))
    built = build(copy.deepcopy(cfg))
    state, names = built.state_dict(), list(map(str, range(192)))
    got, _ = fitted(cfg, built, state, names, names[::-1])
    changed = [name for name in state if not torch.equal(got[name], state[name])]
    assert changed == ['head.weight']
    # A model that cannot be built again, and one without a config, keep their rows.
    for other in (Config(dict(model=dict(type='Gone', num_classes=192))), None):
        got, line = fitted(other, built, state, names, names[::-1])
        assert all(torch.equal(got[name], state[name]) for name in state)
        assert line.startswith('w: row k of heads stays with class k')


def retinanet() -> Config:
    cfg = get_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    cfg.model.backbone.update(THIN)
    cfg.model.neck.update(in_channels=[8, 16, 32, 64], out_channels=16)
    cfg.model.bbox_head.update(in_channels=16, stacked_convs=1, feat_channels=16)
    cfg.model.test_cfg.score_thr = 0.0
    return cfg


@pytest.mark.parametrize('make', [mask_rcnn, dino, retinanet, segmentor, classifier])
def test_rows_go_by_name_where_the_number_of_classes_is_the_same(make: Any) -> None:
    """A model of the same classes in another order predicts the same, by other numbers."""
    cfg, order = make(), [2, 0, 1]
    for head in task_of(cfg).heads_of(cfg).values():
        head['num_classes'] = 3
    source, model = (build(copy.deepcopy(cfg)).eval() for _ in range(2))
    saved = ['cat', 'dog', 'cow']
    got, line = fitted(cfg, model, source.state_dict(), saved, [saved[i] for i in order])
    assert line == 'w: the heads keep the weights of cow, cat, dog'
    model.load_state_dict(got)
    image = torch.randn(1, 3, 96, 128)
    with torch.no_grad():
        if task_of(cfg).format == 'COCO':
            samples = [
                m.predict(image, samples_of(image), rescale=False)[0] for m in (source, model)
            ]
            (a, b) = (x.pred_instances for x in samples)
            assert len(a) == len(b) > 5
            np.testing.assert_allclose(np.sort(a.scores), np.sort(b.scores), atol=1e-5)
            # Of each class as many as of the same name.
            counts = [np.bincount(x.labels, minlength=3) for x in (a, b)]
            assert counts[0][order].tolist() == counts[1].tolist()
        else:
            a, b = (exportable(m)(image) for m in (source, model))
            torch.testing.assert_close(a[:, order], b)
    # Other classes do not get rows of these, and those without names are said.
    got, line = fitted(cfg, model, source.state_dict(), saved, ['bus', 'cat', 'car'])
    assert line == 'w: the heads keep the weights of cat; the heads are new for bus, car'
    assert sum(not torch.equal(got[n], source.state_dict()[n]) for n in got) >= 2
    got, line = fitted(cfg, model, source.state_dict(), (), saved)
    assert line.startswith('w: row k of heads stays with class k')


def test_a_hidden_layer_of_a_head_keeps_its_rows() -> None:
    """Its rows are a multiple of the classes, as those of several anchors are."""
    cfg = classifier()
    width = cfg.model.head.in_channels
    cfg.model.head = dict(
        type='StackedLinearClsHead', num_classes=2, in_channels=width, mid_channels=[16]
    )
    source, model = (build(copy.deepcopy(cfg)).eval() for _ in range(2))
    got, _ = fitted(cfg, model, source.state_dict(), ['cat', 'dog'], ['dog', 'cat'])
    model.load_state_dict(got)
    features = (torch.randn(3, width),)
    torch.testing.assert_close(source.head(features)[:, [1, 0]], model.head(features))


@pytest.mark.parametrize(
    'path',
    [
        'mmdet::tood/tood_r50_fpn_1x_coco.py',
        'mmdet::reppoints/reppoints-moment_r50_fpn_1x_coco.py',
        'mmdet::yolof/yolof_r50-c5_8xb8-1x_coco.py',
        'mmdet::yolact/yolact_r50_8xb8-55e_coco.py',
        'mmdet::autoassign/autoassign_r50-caffe_fpn_1x_coco.py',
        'mmdet::centernet/centernet_r18_8xb16-crop512-140e_coco.py',
        'mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py',
        'mmdet::yolo/yolov3_d53_8xb8-320-273e_coco.py',
        'mmdet::ssd/ssd300_coco.py',
        'mmdet::cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco.py',
        'mmdet::sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py',
        'mmdet::sabl/sabl-retinanet_r50_fpn_1x_coco.py',
        'mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
        'mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py',
        'mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
        'mmdet::rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py',
        'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py',
        'mmseg::ocrnet/ocrnet_hr18_4xb2-160k_cityscapes-512x1024.py',
        'mmseg::pidnet/pidnet-s_2xb6-120k_1024x1024-cityscapes.py',
        'mmpretrain::conformer/conformer-tiny-p16_8xb128_in1k.py',
        'mmseg::danet/danet_r50-d8_4xb4-80k_ade20k-512x512.py',
        'mmseg::encnet/encnet_r50-d8_4xb4-80k_ade20k-512x512.py',
        'mmseg::ddrnet/ddrnet_23_in1k-pre_2xb6-120k_cityscapes-1024x1024.py',
        'mmpretrain::deit/deit-tiny-distilled_4xb256_in1k.py',
        'mmpretrain::levit/levit-128_8xb256_in1k.py',
        'mmpretrain::efficientformer/efficientformer-l1_8xb128_in1k.py',
    ],
)
def test_rows_of_the_heads_of_the_toolboxes(path: str) -> None:
    """Every tensor whose shape depends on the number of classes has rows that go by name."""
    models = []
    for number in (7, 11):
        cfg = get_config(path)
        for head in task_of(cfg).heads_of(cfg).values():
            head['num_classes'] = number
            for loss in (head.get('loss_decode'), head.get('loss_cls')):
                if isinstance(loss, dict):
                    loss.pop('class_weight', None)
        # These compute with tensors while they are built.
        slow = 'segformer' in path or 'conformer' in path
        with torch.device('cpu' if slow else 'meta'):
            models.append(build(copy.deepcopy(cfg)))
    source, target = (model.state_dict() for model in models)
    model = models[1].to_empty(device='cpu')
    weights = {n: torch.randn(x.shape) for n, x in target.items() if source[n].shape != x.shape}
    assert weights
    names = [str(number) for number in range(11)]
    there, _ = fitted(cfg, model, weights, names, names[::-1])
    back, _ = fitted(cfg, model, there, names[::-1], names)
    for name, value in weights.items():
        assert not torch.equal(there[name], value), name
        assert torch.equal(back[name], value), name


def test_published_files_have_the_classes_of_their_data_set() -> None:
    cfg = segmentor()
    for head in task_of(cfg).heads_of(cfg).values():
        head['num_classes'] = 150
    source, model = build(cfg).state_dict(), build(cfg)
    names = ['sky', 'cat', *map(str, range(148))]
    got, line = fitted(cfg, model, source, (), names, 'mmvttt://upernet_hvit3_t_160k')
    assert 'keep the weights of sky; the heads are new for cat' in line
    key = 'decode_head.conv_seg.weight'
    # ADE20K's third class.
    assert torch.equal(got[key][0], source[key][2])


@pytest.mark.parametrize('kind', [hooks.EMAHook, EMAHook])
def test_an_average_of_the_weights_copies_fitted_rows(kind: type) -> None:
    assert get_priority(FitHeads.priority) < get_priority(kind.priority)
