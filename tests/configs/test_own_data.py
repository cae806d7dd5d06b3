"""The worked examples: the demo reads what the maker makes; Penn-Fudan; CamVid as it lies there."""

import inspect
import json
import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import nn

from mmvttt.datasets import make_digits
from mmvttt.datasets.digits.__main__ import main
from mmvttt.registry import MODELS

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


def test_example_changes_classes_in_one_place():
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_t_pennfudan.py')
    assert cfg.classes == ('person',)
    assert all(cfg[loader].dataset.metainfo.classes == cfg.classes for loader in LOADERS)
    assert cfg.model.roi_head.bbox_head.num_classes == len(cfg.classes)
    assert cfg.model.roi_head.mask_head.num_classes == len(cfg.classes)


@pytest.mark.parametrize('name', ['maskrcnn_vittt_demo', 'maskrcnn_vittt_t_pennfudan'])
def test_schedule_ends_with_the_training(name):
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    warm_up, cosine = cfg.param_scheduler
    assert cosine.T_max == cfg.max_epochs == cfg.train_cfg.max_epochs
    assert warm_up.end == 100
    assert cfg.max_epochs % cfg.train_cfg.get('val_interval', 1) == 0


def test_demo_reads_what_the_maker_makes(tmp_path, monkeypatch):
    """From the maker's default folder, through mmdet's data set, at the maker's default size."""
    from mmdet.registry import DATASETS

    defaults = {n: p.default for n, p in inspect.signature(make_digits).parameters.items()}
    monkeypatch.chdir(tmp_path)
    main(['--num-train', '4', '--num-val', '3'])
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_demo.py')
    assert cfg.image_size == (defaults['size'],) * 2
    init_default_scope('mmdet')
    for loader, count in (('train_dataloader', 4), ('val_dataloader', 3)):
        dataset = DATASETS.build(cfg[loader].dataset)
        assert len(dataset) == count
        path = Path(dataset.data_root) / cfg[loader].dataset.ann_file
        annotations = json.loads(path.read_text())['annotations']
        boxes = masks = 0
        for index in range(count):
            sample = dataset[index]
            assert sample['inputs'].shape == (3, defaults['size'], defaults['size'])
            instances = sample['data_samples'].gt_instances
            boxes += len(instances)
            masks += int(instances.masks.masks.sum())
            of_image = [a for a in annotations if a['image_id'] == index + 1]
            assert instances.labels.tolist() == [a['category_id'] - 1 for a in of_image]
            expected = [[x, y, x + w, y + h] for x, y, w, h in (a['bbox'] for a in of_image)]
            assert instances.bboxes.tensor.tolist() == expected
        assert boxes == len(annotations)
        assert masks == sum(a['area'] for a in annotations)


def test_camvid_is_read_as_it_lies_there() -> None:
    from mmseg.registry import DATASETS

    cfg = Config.fromfile(CONFIGS / 'upernet_vittt_t_camvid.py')
    home = os.environ.get('MMVTTT_DATA', CONFIGS.parents[1] / 'shared' / 'data')
    root = Path(home) / 'camvid'
    if not root.is_dir():
        pytest.skip(f'CamVid is not at {root}: set MMVTTT_DATA to the folder that has camvid/')
    init_default_scope('mmseg')
    sets = {
        split: DATASETS.build({**cfg[f'{split}_dataloader'].dataset, 'data_root': str(root)})
        for split in ('train', 'val')
    }
    assert {k: len(v) for k, v in sets.items()} == {'train': 123, 'val': 51}
    classes = len(sets['train'].metainfo['classes'])
    assert classes == cfg.model.decode_head.num_classes == 11
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
    model = Config.fromfile(CONFIGS / 'upernet_vittt_t_camvid.py').model
    norms = (model.backbone.norm_cfg, model.decode_head.norm_cfg, model.auxiliary_head.norm_cfg)
    assert {norm.type for norm in norms} == {'GN'}
    init_default_scope('mmseg')
    with torch.device('meta'):
        built = MODELS.build(model)
    assert not [m for m in built.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
