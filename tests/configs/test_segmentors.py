"""The UperNet configs: the paper's recipe and counts, and a reduced copy of each steps."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

from mmvttt.models.layers import DropPath
from mmvttt.registry import MODELS

from .reduced import batch_norms, reduce_backbone

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
SEGMENTORS = sorted(CONFIGS.glob('upernet_*.py'))
CAMVID = Config.fromfile(CONFIGS / 'upernet_vittt_t_camvid.py')


def reduced(cfg: Config) -> ConfigDict:
    """The model of a config with a thin backbone and thin heads, and norms of two small images."""
    init_default_scope('mmseg')
    model = cfg.model
    model.data_preprocessor.size = (64, 96)
    channels = reduce_backbone(model.backbone)
    model.decode_head.in_channels = channels
    model.auxiliary_head.in_channels = channels[2]
    for head in (model.decode_head, model.auxiliary_head):
        head.channels, head.norm_cfg = 32, dict(type='BN')
    if model.test_cfg.mode == 'slide':
        model.test_cfg.update(crop_size=(48, 48), stride=(32, 32))
    return model


def batch(classes: int, size: tuple[int, int] = (64, 96)) -> dict:
    samples = []
    for _ in range(2):
        meta = dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1, 1))
        sample = SegDataSample(metainfo=meta)
        labels = torch.randint(0, classes, (1, *size))
        labels[:, :8] = 255
        sample.gt_sem_seg = PixelData(data=labels)
        samples.append(sample)
    inputs = [torch.randint(0, 255, (3, *size), dtype=torch.uint8) for _ in range(2)]
    return dict(inputs=inputs, data_samples=samples)


@pytest.mark.parametrize('path', SEGMENTORS, ids=lambda p: p.stem)
def test_reduced_segmentor_steps(path: Path) -> None:
    torch.manual_seed(0)
    cfg = Config.fromfile(path)
    classes = cfg.model.decode_head.num_classes
    assert cfg.model.auxiliary_head.num_classes == classes
    model = MODELS.build(reduced(cfg))
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith('gamma'):
            # γ starts at 0, where nothing behind it can have a gradient.
            nn.init.constant_(parameter, 0.1)
    # The step is in fp32: a bare loop has no autocast around the loss.
    optim = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.train()
    data = model.data_preprocessor(batch(classes), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    loss.backward()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not silent
    optim.step()
    assert loss.isfinite()
    moved = sum(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert moved > 0.9 * len(before)

    model.eval()
    with torch.no_grad():
        results = model(**model.data_preprocessor(batch(classes)), mode='predict')
    assert all(r.pred_sem_seg.data.shape == (1, 64, 96) for r in results)
    assert all(r.pred_sem_seg.data.max() < classes for r in results)


@pytest.mark.parametrize(('name', 'params'), [('t', 9), ('s', 32), ('b', 115)])
def test_ade20k_configs_have_the_backbone_of_tab_2(name: str, params: int) -> None:
    cfg = Config.fromfile(CONFIGS / f'upernet_vittt_{name}_160k.py')
    init_default_scope('mmseg')
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert round(sum(p.numel() for p in model.backbone.parameters()) / 1e6) == params
    assert model.backbone.task == 'seg'


@pytest.mark.parametrize(
    ('name', 'lr', 'decay', 'drop_path'),
    [('t', 12e-5, 0.95, 0.1), ('s', 6e-5, 0.85, 0.2), ('b', 6e-5, 0.8, 0.3)],
)
def test_ade20k_recipe_is_the_papers(name: str, lr: float, decay: float, drop_path: float) -> None:
    """App. D: 160k iterations, 16 images of 512×512, AdamW, weight decay 0.01."""
    cfg = Config.fromfile(CONFIGS / f'upernet_vittt_{name}_160k.py')
    assert cfg.train_cfg.max_iters == 160000
    assert cfg.param_scheduler[-1].end == 160000
    assert cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.optim_wrapper.optimizer.to_dict() == dict(type='AdamW', lr=lr, weight_decay=0.01)
    assert cfg.optim_wrapper.paramwise_cfg.layer_decay_rate == decay
    assert cfg.model.backbone.backbone.drop_path_rate == drop_path
    with torch.device('meta'):
        adapter = MODELS.build(cfg.model.backbone)
    drops = {m.drop_prob for m in adapter.interactions.modules() if isinstance(m, DropPath)}
    assert drops == {drop_path}
    assert batch_norms(adapter) == {'SyncBatchNorm'}
    assert cfg.model.decode_head.num_classes == 150
    pipeline = {t.type: t for t in cfg.train_dataloader.dataset.pipeline}
    assert pipeline['RandomCrop'].crop_size == (512, 512)
    assert pipeline['LoadAnnotations'].reduce_zero_label
    assert cfg.train_dataloader.dataset.type == 'ADE20KDataset'
    assert cfg.model.decode_head.norm_cfg.type == 'SyncBN'


def test_camvid_is_read_as_it_lies_there() -> None:
    from mmseg.registry import DATASETS

    home = os.environ.get('MMVTTT_DATA', CONFIGS.parents[1] / 'shared' / 'data')
    root = Path(home) / 'camvid'
    if not root.is_dir():
        pytest.skip(f'CamVid is not at {root}: set MMVTTT_DATA to the folder that has camvid/')
    init_default_scope('mmseg')
    sets = {
        split: DATASETS.build({**CAMVID[f'{split}_dataloader'].dataset, 'data_root': str(root)})
        for split in ('train', 'val')
    }
    assert {k: len(v) for k, v in sets.items()} == {'train': 123, 'val': 51}
    classes = len(sets['train'].metainfo['classes'])
    assert classes == CAMVID.model.decode_head.num_classes == 11
    sample = sets['train'][0]
    labels = sample['data_samples'].gt_sem_seg.data
    # At most the crop; the preprocessor pads what the resize made smaller.
    assert labels.shape[1:] == sample['inputs'].shape[1:]
    assert max(labels.shape[1:]) <= 320
    assert set(labels.unique().tolist()) <= {*range(classes), 255}
    # At evaluation the labels keep the size of the image.
    sample = sets['val'][0]
    assert sample['data_samples'].gt_sem_seg.data.shape == (1, 360, 480)


def test_camvid_trains_without_statistics_of_a_batch() -> None:
    """SyncBN has no CPU kernel in a process group, and the batches are small."""
    model = CAMVID.model
    norms = (model.backbone.norm_cfg, model.decode_head.norm_cfg, model.auxiliary_head.norm_cfg)
    assert {norm.type for norm in norms} == {'GN'}
    init_default_scope('mmseg')
    with torch.device('meta'):
        built = MODELS.build(model)
    assert not [m for m in built.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
