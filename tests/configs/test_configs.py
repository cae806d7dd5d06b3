"""Every config of the repository is built, and a reduced copy of it takes a training step."""

import copy
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from torch import nn

from mmvttt import distributions
from mmvttt.openmmlab.registry import MODELS

from .reduced import SIZE, batch_for, build, reduced

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
# Generation has its own in tests/generation, distillation in tests/openmmlab/test_distil.py. The
# ResNet is mmpretrain's.
NAMES = sorted(
    path.stem
    for path in CONFIGS.glob('*.py')
    if not path.stem.startswith(('dit', 'sd35m'))
    and 'distil' not in path.stem
    and 'resnet' not in path.stem
)
LISTED = {
    model['Name']: model['Metadata']['Parameters']
    for model in yaml.safe_load((CONFIGS / 'metafile.yml').read_text())['Models']
}


@pytest.mark.parametrize('name', NAMES)
def test_it_builds_with_the_parameters_of_the_metafile(name: str) -> None:
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    if cfg.default_scope in ('mmdet', 'mmseg') and name != 'maskrcnn_vittt_demo':
        # In a batch of several sizes the smaller images are padded, and something else is found.
        assert cfg.val_dataloader.batch_size == cfg.test_dataloader.batch_size == 1
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    count = sum(p.numel() for n, p in model.named_parameters() if not n.startswith('teacher.'))
    # The fork's DINO encodes a coordinate by 256 numbers, the original's by 128.
    fork = distributions.providers('mmdet') == ['onedl-mmdetection']
    more = 131_072 if fork and name.startswith('dino_') else 0
    assert count == LISTED.get(name, count - more) + more


@pytest.mark.parametrize('name', NAMES)
def test_a_reduced_copy_steps_and_predicts(name: str) -> None:
    cfg = reduced(name)
    if cfg.default_scope == 'mmpretrain':
        # In one step, stochastic depth would leave whole branches without a gradient.
        cfg.model.backbone.drop_path_rate = 0.0
    model = build(cfg)
    model.init_weights()
    # γ (`gamma`, `gamma_1`) starts at or near 0, where nothing behind it can have a gradient.
    for tensor, parameter in model.named_parameters():
        if 'gamma' in tensor.rpartition('.')[2]:
            nn.init.constant_(parameter, 0.1)
    if 'mesa' in name:
        model.distilling = True
    # The step is in fp32: a bare loop has no autocast around the loss.
    optim = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    batch = model.train().data_preprocessor(batch_for(cfg), training=True)
    losses = model(**batch, mode='loss')
    assert ('loss_mesa' in losses) == ('mesa' in name)
    loss, _ = model.parse_losses(losses)
    loss.backward()
    assert loss.isfinite()
    assert not [n for n, p in trained.items() if p.grad is None]
    optim.step()
    moved = sum(not torch.equal(p, before[n]) for n, p in trained.items())
    # Layers behind one that begins at 0 stay (DINO's boxes, deformable attention).
    assert moved > 0.9 * len(before)
    with torch.no_grad():
        samples = model.eval()(**model.data_preprocessor(batch_for(cfg)), mode='predict')
    assert len(samples) == 2
    for sample in samples:
        if cfg.default_scope == 'mmpretrain':
            assert len(sample.pred_score) == cfg.model.head.num_classes
        elif cfg.default_scope == 'mmseg':
            assert sample.pred_sem_seg.data.shape == (1, *SIZE)
            assert sample.pred_sem_seg.data.max() < cfg.model.decode_head.num_classes
        else:
            assert ('masks' in sample.pred_instances) == (
                not name.startswith(('dino_', 'fasterrcnn_'))
            )


@pytest.mark.parametrize(
    'name', ['t5_t_in1k_30e', 'maskrcnn_vittt_t_1x', 'maskrcnn_hvit3_t_1x', 'upernet_vittt_t_160k']
)
def test_its_pipelines_load_a_labelled_image(name: str, tmp_path: Path) -> None:
    image, labels = str(tmp_path / 'a.jpg'), str(tmp_path / 'a.png')
    cv2.imwrite(image, np.random.default_rng(0).integers(0, 255, (64, 96, 3)))
    cv2.imwrite(labels, np.full((64, 96), 5, np.uint8))
    box = dict(bbox=[8, 8, 48, 48], bbox_label=3, ignore_flag=0)
    info = dict(
        img_path=image,
        img_id=1,
        gt_label=3,
        instances=[dict(box, mask=[[8, 8, 48, 8, 48, 48, 8, 48]])],
        **dict(seg_map_path=labels, label_map=None, reduce_zero_label=True, seg_fields=[]),
    )
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    init_default_scope(cfg.default_scope)
    for loader in (cfg.train_dataloader, cfg.test_dataloader):
        item = Compose(loader.dataset.pipeline)(copy.deepcopy(info))
        assert item['inputs'].shape[0] == 3
        sample = item['data_samples']
        if cfg.default_scope == 'mmpretrain':
            assert sample.gt_label.tolist() == [3]
        elif cfg.default_scope == 'mmseg':
            # Without the background's label; 255 is padding.
            assert set(sample.gt_sem_seg.data.unique().tolist()) <= {4, 255}
        elif 'hvit3' not in name:
            # The crops of H-ViT³ may leave the box out.
            assert sample.gt_instances.labels.tolist() == [3]


@pytest.mark.parametrize('root', ['data', 'elsewhere/sets'])
def test_one_variable_moves_the_data(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if root != 'data':
        monkeypatch.setenv('MMVTTT_DATA', root)
    for name, folder, split in (('1x', 'coco', 'val2017'), ('pennfudan', 'pennfudan', 'val')):
        cfg = Config.fromfile(CONFIGS / f'maskrcnn_vittt_t_{name}.py')
        for part in ('train', 'val', 'test'):
            assert cfg[f'{part}_dataloader'].dataset.data_root == f'{root}/{folder}/'
        annotations = f'{root}/{folder}/annotations/instances_{split}.json'
        assert cfg.val_evaluator.ann_file == cfg.test_evaluator.ann_file == annotations
