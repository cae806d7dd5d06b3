"""Every config of the repository is built, and a reduced copy of it takes a training step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config, ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData

from mmvttt.registry import MODELS

from .reduced import reduce_backbone

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
DETECTORS = sorted(CONFIGS.glob('maskrcnn_*.py'))


def detector(path: Path) -> ConfigDict:
    """The model of a config, its backbone and heads reduced, its norms fit for two small images."""
    cfg = Config.fromfile(path)
    init_default_scope(cfg.default_scope)
    model = cfg.model
    model.neck.in_channels = reduce_backbone(model.backbone)
    model.roi_head.bbox_head.fc_out_channels = 32
    model.train_cfg.rcnn.sampler.num = 16
    for part in (model.train_cfg.rpn_proposal, model.test_cfg.rpn):
        part.max_per_img = 16
    return model


def det_batch(size: tuple[int, int] = (64, 96)) -> dict:
    """Two images with two boxes and masks each."""
    height, width = size
    samples = []
    for _ in range(2):
        boxes = torch.tensor([[4.0, 4, 40, 44], [30, 20, 90, 60]])
        masks = np.zeros((2, height, width), np.uint8)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        sample = DetDataSample(
            metainfo=dict(
                img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1, 1), img_id=0
            )
        )
        sample.gt_instances = InstanceData(
            bboxes=boxes, labels=torch.zeros(2, dtype=torch.long), masks=BitmapMasks(masks, *size)
        )
        samples.append(sample)
    inputs = [torch.randint(0, 255, (3, *size), dtype=torch.uint8) for _ in range(2)]
    return dict(inputs=inputs, data_samples=samples)


@pytest.mark.parametrize('path', DETECTORS, ids=lambda p: p.stem)
def test_reduced_detector_steps(path: Path) -> None:
    torch.manual_seed(0)
    cfg = Config.fromfile(path)
    model = MODELS.build(detector(path))
    model.init_weights()
    # γ starts at 0, where nothing behind it can have a gradient.
    for name, parameter in model.named_parameters():
        if name.endswith('gamma'):
            torch.nn.init.constant_(parameter, 0.1)
    # The step is in fp32: a bare loop has no autocast around the loss.
    optim = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.train()
    batch = model.data_preprocessor(det_batch(), training=True)
    loss, _ = model.parse_losses(model(**batch, mode='loss'))
    loss.backward()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not silent
    optim.step()
    moved = sum(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert moved > 0.9 * len(before)
    assert loss.isfinite()

    model.eval()
    with torch.no_grad():
        results = model(**model.data_preprocessor(det_batch()), mode='predict')
    assert len(results) == 2
    assert all('masks' in r.pred_instances for r in results)


@pytest.mark.parametrize(('name', 'params'), [('t', 9), ('s', 32), ('b', 115)])
def test_coco_configs_have_the_backbone_of_tab_2(name: str, params: int) -> None:
    cfg = Config.fromfile(CONFIGS / f'maskrcnn_vittt_{name}_1x.py')
    init_default_scope('mmdet')
    with torch.device('meta'):
        backbone = MODELS.build(cfg.model.backbone)
    millions = sum(p.numel() for p in backbone.parameters()) / 1e6
    # Tab. 2 counts backbone and adapter, without the classifier's head.
    assert round(millions) == params


def test_coco_recipe_is_the_papers() -> None:
    """App. D: 12 epochs, 16 images, AdamW 1e-4, weight decay 0.05, multi-scale up to 1333×800."""
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_s_1x.py')
    assert cfg.train_cfg.max_epochs == 12
    assert cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.optim_wrapper.optimizer.type == 'AdamW'
    assert cfg.optim_wrapper.optimizer.lr == 1e-4
    assert cfg.optim_wrapper.optimizer.weight_decay == 0.05
    assert 'momentum' not in cfg.optim_wrapper.optimizer
    resize = cfg.train_dataloader.dataset.pipeline[2]
    assert resize.type == 'RandomChoiceResize'
    assert (1333, 800) in [tuple(s) for s in resize.scales]
    assert max(max(s) for s in resize.scales) == 1333
    assert [t.type for t in cfg.train_dataloader.dataset.pipeline] == [
        'LoadImageFromFile',
        'LoadAnnotations',
        'RandomChoiceResize',
        'RandomFlip',
        'PackDetInputs',
    ]


@pytest.mark.parametrize('root', ['data', 'elsewhere/sets'])
def test_one_variable_moves_the_data(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('MMVTTT_DATA', raising=False)
    if root != 'data':
        monkeypatch.setenv('MMVTTT_DATA', root)
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_t_1x.py')
    assert cfg.train_dataloader.dataset.data_root == f'{root}/coco/'
    assert cfg.test_dataloader.dataset.data_root == f'{root}/coco/'
    assert cfg.val_evaluator.ann_file == f'{root}/coco/annotations/instances_val2017.json'
