"""The demo fits the set that the maker makes; one variable moves the data of the worked example."""

import inspect
import json
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import init_default_scope

from mmvttt.datasets import make_digits
from mmvttt.datasets.digits.__main__ import main

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


def places(cfg: Config) -> list[str]:
    """Paths that a config reads: the root of every data set, the annotations of every evaluator."""
    roots = [cfg[loader].dataset.data_root for loader in LOADERS]
    return [*roots, cfg.val_evaluator.ann_file, cfg.test_evaluator.ann_file]


@pytest.mark.parametrize('root', [None, 'elsewhere/sets'])
def test_one_variable_moves_the_example(root, monkeypatch):
    monkeypatch.delenv('MMVTTT_DATA', raising=False)
    if root:
        monkeypatch.setenv('MMVTTT_DATA', root)
    base = f'{root or "data"}/pennfudan/'
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_t_pennfudan.py')
    annotations = base + 'annotations/instances_val.json'
    assert places(cfg) == [base, base, base, annotations, annotations]


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
