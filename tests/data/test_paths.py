"""The sentence about missing data."""

from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import MissingDataError

from .sets import check_data, coco_dataset, config

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
    monkeypatch.setenv('HOME', str(boxes))
    for folder in ('data/coco', 'sets', '~', '/elsewhere/coco'):
        if folder.startswith('/'):
            monkeypatch.setenv('MMVTTT_DATA', '/elsewhere')
        with pytest.raises(MissingDataError, match=f'{boxes / folder}, ') as error:
            check_data(config(coco_dataset(folder), split='val'))
        # The variable moves only what lies under it.
        assert ('MMVTTT_DATA' in str(error.value)) == folder.endswith('coco')
    pytest.importorskip('mmpretrain')
    # Which alone expands it, in its prefixes.
    pictures = dict(type='CustomDataset', data_prefix='~/images', with_label=False)
    check_data(config(pictures, default_scope='mmpretrain'))


@pytest.mark.parametrize(
    ('key', 'changes'),
    [
        ('ann_file', dict(ann_file='no')),
        ('data_prefix', dict(data_prefix='no')),
        ('data_prefix.img', dict(data_prefix=dict(img='no'))),
        ('data_prefix.seg', dict(SEG, pipeline=[dict(type='LoadAnnotations', with_seg=True)])),
        ('data_prefix.seg', dict(SEG, pipeline=[dict(type='mmdet.LoadPanopticAnnotations')])),
    ],
)
def test_missing_parts(boxes: Path, key: str, changes: dict) -> None:
    dataset = coco_dataset(boxes, **changes)
    several = dict(type='ConcatDataset', datasets=[dict(type='TinyData'), dataset])
    wrapped = dict(type='RepeatDataset', times=2, dataset=several)
    for data, path in ((dataset, 'dataset'), (wrapped, 'dataset.dataset.datasets.1')):
        with pytest.raises(
            MissingDataError, match=rf"{boxes}/no'.*_dataloader\.{path}\.{key}=PATH"
        ):
            check_data(config(data))


def test_a_missing_file_of_a_metric(boxes: Path) -> None:
    local = dict(METRIC, backend_args=dict(backend='local'))
    with pytest.raises(MissingDataError, match=r'val_evaluator\.ann_file'):
        check_data(config(coco_dataset(boxes), split='val', val_evaluator=local))
