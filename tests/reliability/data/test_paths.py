"""The sentence about missing data."""

from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import MissingDataError
from mmvttt.reliability.data.paths import check_data


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
    split = 'val'
    with pytest.raises(MissingDataError) as error:
        check_data(config(coco('data/coco/'), split))
    assert str(error.value) == (
        f"The validation data is missing: the folder 'data/coco/' does not exist (expected at "
        f'{root}/data/coco, named by {split}_dataloader.dataset.data_root); put or link it there, '
        f'or point elsewhere with --cfg-options {split}_dataloader.dataset.data_root=PATH'
    )


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(ann_file='val.json'), r"annotation file '.*/val\.json'.*dataset\.ann_file=PATH"),
        (dict(data_prefix=dict(img='val')), r"folder '.*/val'.*dataset\.data_prefix\.img=PATH"),
        (dict(data_prefix='val'), r"folder '.*/val'.*dataset\.data_prefix=PATH"),
    ],
)
def test_missing_parts(root: Path, changes: dict, message: str) -> None:
    with pytest.raises(MissingDataError, match=message):
        check_data(config({**coco(root), **changes}))


@pytest.mark.parametrize(
    ('transform', 'read'),
    [
        (dict(type='LoadAnnotations', with_mask=True), False),
        (dict(type='LoadAnnotations', with_seg=True), True),
        (dict(type='mmdet.LoadPanopticAnnotations'), True),
    ],
)
def test_label_maps_of_coco_only_where_they_are_read(
    root: Path, transform: dict, read: bool
) -> None:
    """Mask2Former's configs for instances inherit them from the panoptic one."""
    cfg = config({**coco(root, pipeline=[transform]), 'data_prefix': dict(img='', seg='no')})
    if not read:
        check_data(cfg)
        return
    with pytest.raises(MissingDataError, match=r"folder '.*/no'.*dataset\.data_prefix\.seg=PATH"):
        check_data(cfg)


@pytest.mark.parametrize(
    ('wrap', 'key'),
    [
        (lambda d: dict(type='RepeatDataset', times=2, dataset=d), 'dataset.dataset.data_root'),
        (
            lambda d: dict(type='ConcatDataset', datasets=[dict(type='TinyData'), d]),
            'dataset.datasets.1.data_root',
        ),
    ],
)
def test_wrapped_data_sets(wrap: object, key: str) -> None:
    with pytest.raises(MissingDataError, match=rf'--cfg-options train_dataloader\.{key}=PATH'):
        check_data(config(wrap(coco('nowhere'))))


def test_names_the_environment_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / 'c.py').write_text(
        "data_root = '{{$SOME_DATA:data}}/coco/'\n"
        'train_dataloader = dict(dataset=dict(data_root=data_root))\n'
    )
    for value in ('data', '/elsewhere'):
        with pytest.raises(MissingDataError, match=rf"variable SOME_DATA \(now '{value}'\)"):
            check_data(Config.fromfile(root / 'c.py'))
        monkeypatch.setenv('SOME_DATA', '/elsewhere')
