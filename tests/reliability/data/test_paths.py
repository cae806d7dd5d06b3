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
    base = dict(type='CocoDataset', data_root=str(root), ann_file='train.json')
    return {**base, 'data_prefix': dict(img='images/'), **changes}


SEG = dict(data_prefix=dict(img='', seg='no'))
# A storage backend may map its paths to elsewhere, as mmdet's documentation of Petrel does.
REMOTE = dict(backend_args=dict(backend='petrel', path_mapping={'remote/': 's3://bucket/'}))
METRIC = dict(type='CocoMetric', ann_file='remote/val.json')


def test_nothing_to_say_where_all_is_there(root: Path) -> None:
    loader = dict(type='LoadImageFromFile', **REMOTE)
    masks = dict(type='LoadAnnotations', with_mask=True)
    for dataset in (
        coco(root),
        dict(type='TinyData'),
        dict(type='ImageNet', data_root=str(root), data_prefix='images'),
        dict(type='CocoDataset', data_root='s3://bucket/coco/'),
        dict(type='mmpretrain.CIFAR10', data_root='nowhere'),
        coco(root, pipeline=[loader], data_prefix=dict(img='remote/')),
        # Mask2Former's configs for instances inherit the label maps from the panoptic one.
        coco(root, pipeline=[masks], **SEG),
    ):
        check_data(config(dataset))
    check_data(Config(dict(train_dataloader=None)))
    check_data(config(coco('remote/', **REMOTE), 'val', val_evaluator=[{**METRIC, **REMOTE}]))
    check_data(config(coco('nowhere'), 'test'), ('train', 'val'))


def test_missing_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.delenv('MMVTTT_DATA', raising=False)
    for folder, words in (
        ('data/coco/', 'variable MMVTTT_DATA'),
        ('sets/', 'or point'),
    ):
        with pytest.raises(MissingDataError, match=f'{root}/{folder[:-1]}, .*{words}') as error:
            check_data(config(coco(folder), 'val'))
        assert ('MMVTTT_DATA' in str(error.value)) == (folder == 'data/coco/')
    monkeypatch.setenv('MMVTTT_DATA', '/elsewhere')
    with pytest.raises(MissingDataError, match='MMVTTT_DATA'):
        check_data(config(coco('/elsewhere/coco')))
    monkeypatch.setenv('HOME', str(root))
    with pytest.raises(MissingDataError, match="the folder '~' does not exist"):
        check_data(config(coco('~')))
    pytest.importorskip('mmpretrain')
    # Which alone expands it, in its prefixes.
    pictures = dict(type='CustomDataset', data_prefix='~/images', with_label=False)
    check_data(config(pictures, default_scope='mmpretrain'))


MISSING: dict[str, tuple[dict, str]] = {
    'annotations': (dict(ann_file='no.json'), r"annotation file '.*/no\.json'.*ann_file=PATH"),
    'images': (dict(data_prefix=dict(img='no')), r"folder '.*/no'.*data_prefix\.img=PATH"),
    'a prefix alone': (dict(data_prefix='no'), 'data_prefix=PATH'),
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
    dataset = coco(root, **changes)
    with pytest.raises(MissingDataError, match=message):
        check_data(config(dataset))
    several = dict(type='ConcatDataset', datasets=[dict(type='TinyData'), dataset])
    wrapped = dict(type='RepeatDataset', times=2, dataset=several)
    with pytest.raises(MissingDataError, match=r'dataset\.dataset\.datasets\.1\.'):
        check_data(config(wrapped))


def test_a_missing_file_of_a_metric(root: Path) -> None:
    local = dict(METRIC, backend_args=dict(backend='local'))
    with pytest.raises(MissingDataError, match=r'val_evaluator\.ann_file'):
        check_data(config(coco(root), 'val', val_evaluator=local))
