"""The check of annotations: what it takes for known, what it logs, and that real sets pass.

Faults of every kind are generated in test_faulty_annotations.py.
"""

import json
import logging
import os
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.logging import MMLogger

from mmvttt.errors import DataError, MissingDataError
from mmvttt.reliability.data.annotations import check_annotations
from mmvttt.reliability.data.paths import check_data

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get('MMVTTT_DATA', ROOT.parent / 'shared/data'))
CONTENT = dict(
    images=[dict(id=1, file_name='a.jpg', height=20, width=30)],
    annotations=[
        dict(id=1, image_id=1, category_id=7, bbox=[1, 2, 10, 9], area=90, iscrowd=0),
    ],
    categories=[dict(id=7, name='cat'), dict(id=8, name='dog')],
)


@pytest.fixture
def coco(tmp_path: Path) -> dict:
    """The config of a set with one box; the image is a name, of which nothing is read here."""
    pytest.importorskip('mmdet')
    (tmp_path / 'a.json').write_text(json.dumps(CONTENT))
    (tmp_path / 'a.jpg').touch()
    return dict(
        type='CocoDataset',
        data_root=str(tmp_path),
        ann_file='a.json',
        data_prefix=dict(img=''),
        metainfo=dict(classes=('cat',)),
    )


def config(dataset: object, split: str = 'train', **more: object) -> Config:
    return Config({'default_scope': 'mmdet', f'{split}_dataloader': dict(dataset=dataset), **more})


def change(dataset: dict, **parts: object) -> None:
    Path(dataset['data_root'], 'a.json').write_text(json.dumps({**CONTENT, **parts}))


@pytest.mark.parametrize('rank', ['0', '1'])
def test_what_is_dropped_is_logged_by_one_rank(
    coco: dict, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('RANK', rank)
    records = []
    monkeypatch.setattr(MMLogger, 'callHandlers', lambda self, record: records.append(record))
    check_data(config(coco))
    warnings = [record.msg for record in records if record.levelno == logging.WARNING]
    sentence = (
        "train_dataloader.dataset: categories that are left out, being no class of metainfo: 'dog'"
    )
    assert warnings == ([sentence] if rank == '0' else [])


def test_errors_name_the_data_set(coco: dict) -> None:
    change(coco, categories=[dict(id=7, name='cow')])
    wrapped = dict(type='RepeatDataset', times=2, dataset=coco)
    with pytest.raises(DataError) as error:
        check_data(config(wrapped))
    assert str(error.value) == (
        'train_dataloader.dataset.dataset: no class of metainfo is a category of '
        f"{coco['data_root']}/a.json, so that every box would be dropped: the classes are 'cat', "
        "the categories 'cow'; set metainfo=dict(classes=('cow',)), and the heads' num_classes"
    )
    assert not isinstance(error.value, MissingDataError)


def test_each_set_is_checked_once(coco: dict) -> None:
    cfg = config(coco)
    cfg.val_dataloader = dict(dataset=dict(coco, test_mode=True))
    cfg.test_dataloader = cfg.val_dataloader
    places = [found.place for found in check_annotations(cfg, thorough=False)]
    assert places == ['train_dataloader.dataset', 'val_dataloader.dataset']
    (found,) = check_annotations(cfg, ('val', 'test'), thorough=False)
    assert found.place == places[1]


def test_images_without_a_box_may_be_part_of_a_training(coco: dict) -> None:
    """Alone they cannot be, nor may labels change from part to part."""
    change(coco, annotations=[])
    with pytest.raises(DataError, match='no box to learn'):
        check_data(config(coco))
    check_data(config(coco, 'val'), ('val',))
    check_data(config(dict(type='ConcatDataset', datasets=[coco, dict(coco, indices=1)])))


def test_a_test_set_may_come_without_annotations(coco: dict) -> None:
    content = {key: value for key, value in CONTENT.items() if key != 'annotations'}
    Path(coco['data_root'], 'a.json').write_text(json.dumps(content))
    check_data(config(coco, 'test'), ('test',))
    with pytest.raises(DataError, match="no list annotations, but 'images', 'categories'"):
        check_data(config(coco))


@pytest.mark.parametrize(
    'changes',
    [
        dict(type='CocoPanopticDataset'),
        dict(type='LVISV1Dataset'),
        dict(type='NoSuchDataset'),
        dict(type=dict),
        dict(type=None),
        dict(data_root='s3://bucket/'),
        dict(ann_file='https://example.com/a.json'),
        dict(data_prefix=dict(img='s3://bucket/')),
        dict(backend_args=dict(backend='petrel')),
    ],
)
def test_other_formats_and_places_are_left_alone(coco: dict, changes: dict) -> None:
    change(coco, categories=None)
    assert not list(check_annotations(config({**coco, **changes}), thorough=False))


def test_images_from_elsewhere_are_not_looked_for(coco: dict) -> None:
    Path(coco['data_root'], 'a.jpg').unlink()
    for pipeline, looked_for in (
        ([], True),
        ([dict(type='mmdet.LoadImageFromFile')], True),
        ([dict(type='LoadImageFromNDArray')], False),
    ):
        findings = check_annotations(config(dict(coco, pipeline=pipeline)), thorough=False)
        assert [bool(found.errors) for found in findings] == [looked_for]


@pytest.mark.parametrize(
    ('name', 'folder', 'images'),
    [
        ('maskrcnn_vittt_t_pennfudan', 'pennfudan', [100, 30]),
        ('upernet_vittt_t_camvid', 'camvid', [123, 51]),
    ],
)
def test_real_sets_have_no_fault(
    name: str, folder: str, images: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photographs, RLE masks and label maps as they come; the images are decoded in val alone."""
    if not (DATA / folder).is_dir():
        pytest.skip(f'{folder} is not under {DATA}: set MMVTTT_DATA')
    monkeypatch.setenv('MMVTTT_DATA', str(DATA))
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    check_data(cfg)
    train, val = check_annotations(cfg, ('train',), images=False), check_annotations(cfg, ('val',))
    for found, count in zip([*train, *val], images, strict=True):
        assert not found.errors + found.warnings, str(found)
        assert found.summary.startswith(f'{count} images')
