"""The sentence about missing data."""

from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import MissingDataError
from mmvttt.openmmlab.reliability.data.annotations import check_data


def config(dataset: dict, split: str = 'train', **more: object) -> Config:
    return Config({f'{split}_dataloader': dict(batch_size=1, dataset=dataset), **more})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / 'images').mkdir()
    (tmp_path / 'train.json').write_text('{}')
    return tmp_path


def coco(root: object, **changes: object) -> dict:
    return dict(
        type='CocoDataset',
        data_root=str(root),
        ann_file='train.json',
        data_prefix=dict(img='images/'),
        **changes,
    )


def test_nothing_to_say_where_all_is_there(root: Path) -> None:
    check_data(config(coco(root)))
    check_data(config(dict(type='TinyData')))
    check_data(Config(dict(train_dataloader=None)))
    check_data(config(dict(type='ImageNet', data_root=str(root), data_prefix='images')))
    check_data(config(dict(type='CocoDataset', data_root='s3://bucket/coco/')))
    check_data(config(dict(type='mmpretrain.CIFAR10', data_root='nowhere')))
    check_data(config(coco('nowhere'), 'test'), ('train', 'val'))
    with pytest.raises(ValueError, match=r"\['test_dataloader'\]: choose from train, val, test"):
        check_data(config(coco('nowhere'), 'test'), ('test_dataloader',))


def test_a_storage_backend_knows_its_paths(root: Path) -> None:
    """It may map them to elsewhere, as mmdet's documentation of Petrel does."""
    remote = dict(backend_args=dict(backend='petrel', path_mapping={'remote/': 's3://bucket/'}))
    metric = dict(type='CocoMetric', ann_file='remote/val.json')
    check_data(config(coco('remote/', **remote), 'val', val_evaluator=[{**metric, **remote}]))
    loader = dict(type='LoadImageFromFile', **remote)
    check_data(config({**coco(root, pipeline=[loader]), 'data_prefix': dict(img='remote/')}))
    local = dict(backend_args=dict(backend='local'))
    with pytest.raises(MissingDataError, match=r'val_evaluator\.ann_file'):
        check_data(config(coco(root), 'val', val_evaluator={**metric, **local}))


def test_missing_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(MissingDataError) as error:
        check_data(config(coco('data/coco/'), 'val'))
    assert str(error.value) == (
        "The validation data is missing: the folder 'data/coco/' does not exist (expected at "
        f'{root}/data/coco, named by val_dataloader.dataset.data_root); put or link it there, '
        'set the environment variable MMVTTT_DATA, '
        'or point elsewhere with --cfg-options val_dataloader.dataset.data_root=PATH'
    )


SEG = dict(data_prefix=dict(img='', seg='no'))
MISSING: dict[str, tuple[dict, str]] = {
    'annotations': (dict(ann_file='no.json'), r"annotation file '.*/no\.json'.*ann_file=PATH"),
    'images': (dict(data_prefix=dict(img='no')), r"folder '.*/no'.*data_prefix\.img=PATH"),
    'a prefix alone': (dict(data_prefix='no'), r"folder '.*/no'.*data_prefix=PATH"),
    'label maps': (
        dict(**SEG, pipeline=[dict(type='LoadAnnotations', with_seg=True)]),
        r"folder '.*/no'.*data_prefix\.seg=PATH",
    ),
    'panoptic': (
        dict(**SEG, pipeline=[dict(type='mmdet.LoadPanopticAnnotations')]),
        r"folder '.*/no'.*data_prefix\.seg=PATH",
    ),
}


@pytest.mark.parametrize('part', MISSING)
def test_missing_parts(root: Path, part: str) -> None:
    changes, message = MISSING[part]
    dataset = {**coco(root), **changes}
    with pytest.raises(MissingDataError, match=message):
        check_data(config(dataset))
    several = dict(type='ConcatDataset', datasets=[dict(type='TinyData'), dataset])
    wrapped = dict(type='RepeatDataset', times=2, dataset=several)
    with pytest.raises(MissingDataError, match=r'dataset\.dataset\.datasets\.1\.'):
        check_data(config(wrapped))


def test_label_maps_of_coco_only_where_they_are_read(root: Path) -> None:
    """Mask2Former's configs for instances inherit them from the panoptic one."""
    instances = dict(pipeline=[dict(type='LoadAnnotations', with_mask=True)], **SEG)
    check_data(config({**coco(root), **instances}))


def test_names_the_environment_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ('data/', '/elsewhere'):
        with pytest.raises(MissingDataError, match='set the environment variable MMVTTT_DATA, or'):
            check_data(config(coco(f'{value}/coco')))
        monkeypatch.setenv('MMVTTT_DATA', '/elsewhere')
