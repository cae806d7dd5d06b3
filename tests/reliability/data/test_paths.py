"""The sentence about missing data."""

from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import MissingDataError
from mmvttt.openmmlab.reliability.data.annotations import check_data

from .sets import coco_dataset, config

SEG = dict(data_prefix=dict(img='', seg='no'))
# A storage backend may map its paths to elsewhere, as mmdet's documentation of Petrel does.
REMOTE = dict(backend_args=dict(backend='petrel', path_mapping={'remote/': 's3://bucket/'}))
METRIC = dict(type='CocoMetric', ann_file='remote/val.json')


def test_nothing_to_say_where_all_is_there(boxes: Path) -> None:
    loader = dict(type='LoadImageFromFile', **REMOTE)
    masks = dict(type='LoadAnnotations', with_mask=True)
    for dataset in (
        coco_dataset(boxes),
        dict(type='TinyData'),
        dict(type='ImageNet', data_root=str(boxes), data_prefix='images'),
        dict(type='CocoDataset', data_root='s3://bucket/coco/'),
        dict(type='mmpretrain.CIFAR10', data_root='nowhere'),
        coco_dataset(boxes, pipeline=[loader], data_prefix=dict(img='remote/')),
        # Mask2Former's configs for instances inherit the label maps from the panoptic one.
        coco_dataset(boxes, pipeline=[masks], **SEG),
    ):
        check_data(config(dataset))
    check_data(Config(dict(train_dataloader=None)))
    check_data(
        config(coco_dataset('remote/', **REMOTE), split='val', val_evaluator=[{**METRIC, **REMOTE}])
    )
    check_data(config(coco_dataset('nowhere'), split='test'), ('train', 'val'))


def test_missing_root(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(boxes)
    monkeypatch.delenv('MMVTTT_DATA', raising=False)
    for folder, words in (
        ('data/coco/', 'variable MMVTTT_DATA'),
        ('sets/', 'or point'),
    ):
        with pytest.raises(MissingDataError, match=f'{boxes}/{folder[:-1]}, .*{words}') as error:
            check_data(config(coco_dataset(folder), split='val'))
        assert ('MMVTTT_DATA' in str(error.value)) == (folder == 'data/coco/')
    monkeypatch.setenv('MMVTTT_DATA', '/elsewhere')
    with pytest.raises(MissingDataError, match='MMVTTT_DATA'):
        check_data(config(coco_dataset('/elsewhere/coco')))
    monkeypatch.setenv('HOME', str(boxes))
    with pytest.raises(MissingDataError, match="the folder '~' does not exist"):
        check_data(config(coco_dataset('~')))
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
def test_missing_parts(boxes: Path, part: str) -> None:
    changes, message = MISSING[part]
    dataset = coco_dataset(boxes, **changes)
    with pytest.raises(MissingDataError, match=message):
        check_data(config(dataset))
    several = dict(type='ConcatDataset', datasets=[dict(type='TinyData'), dataset])
    wrapped = dict(type='RepeatDataset', times=2, dataset=several)
    with pytest.raises(MissingDataError, match=r'dataset\.dataset\.datasets\.1\.'):
        check_data(config(wrapped))


def test_a_missing_file_of_a_metric(boxes: Path) -> None:
    local = dict(METRIC, backend_args=dict(backend='local'))
    with pytest.raises(MissingDataError, match=r'val_evaluator\.ann_file'):
        check_data(config(coco_dataset(boxes), split='val', val_evaluator=local))
