"""Labels that mean something else: each is said, most of it before a training."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from mmvttt.openmmlab.reliability.data.annotations import check_annotations
from mmvttt.openmmlab.reliability.data.findings import Findings
from mmvttt.openmmlab.reliability.data.images import read_image

from .sets import (
    SIZE,
    coco,
    coco_dataset,
    config,
    folder_dataset,
    label_dataset,
    make_coco,
    make_folders,
    make_labels,
    picture,
    write,
)

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
pytest.importorskip('mmpretrain')


def only(cfg: Config, thorough: bool = False) -> Findings:
    (found,) = check_annotations(cfg, ('train',), thorough=thorough)
    return found


@pytest.fixture(scope='module')
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('coco') / 'set'
    make_coco(folder)
    return folder


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    make_labels(tmp_path / 'set')
    return tmp_path / 'set'


def changed(root: Path, change: Callable[[dict], object], **dataset: object) -> Findings:
    content = coco()
    for ann in content['annotations']:
        change(ann)
    write(root, content)
    return only(config(coco_dataset(root, **dataset)))


@pytest.mark.parametrize(
    ('heads', 'place'),
    [
        (dict(roi_head=dict(mask_head=dict(num_classes=1))), 'model.roi_head.mask_head'),
        (
            dict(roi_head=dict(bbox_head=[dict(num_classes=2), dict(num_classes=1)])),
            'model.roi_head.bbox_head.1',
        ),
        (dict(panoptic_head=dict(num_things_classes=1)), 'model.panoptic_head'),
    ],
)
def test_every_head_of_a_detector(boxes: Path, heads: dict, place: str) -> None:
    write(boxes, coco())
    (error,) = only(config(coco_dataset(boxes), model=heads)).errors
    assert error.startswith(
        f'{place} has num_classes=1 for 2 classes of the data: set num_classes=2'
    )


def test_heads_that_are_no_fault(boxes: Path) -> None:
    write(boxes, coco())
    mask = dict(num_classes=1, class_agnostic=True)
    heads = dict(bbox_head=dict(num_classes=80), mask_head=mask)
    found = only(config(coco_dataset(boxes), model=dict(roi_head=heads)))
    assert not found.errors
    assert 'model.roi_head.bbox_head has num_classes=80 for 2 classes' in found.warnings[0]


@pytest.mark.parametrize('several', [False, True])
def test_auxiliary_heads_of_a_segmentor(labels: Path, several: bool) -> None:
    head = dict(num_classes=2)
    model = dict(decode_head=dict(num_classes=3), auxiliary_head=[head] if several else head)
    errors = only(config(label_dataset(labels), 'mmseg', model=model)).errors
    place = 'model.auxiliary_head.0' if several else 'model.auxiliary_head'
    assert errors[0].startswith(f'{place} has num_classes=2 for 3 classes')


def test_one_hot_labels_of_another_length(tmp_path: Path) -> None:
    make_folders(tmp_path)
    model = dict(head=dict(num_classes=3), data_preprocessor=dict(num_classes=1000))
    (error,) = only(config(folder_dataset(tmp_path), 'mmpretrain', model=model)).errors
    assert error.startswith('data_preprocessor.num_classes is 1000, and model.head.num_classes 3')


def test_folders_in_another_order_than_the_classes(tmp_path: Path) -> None:
    make_folders(tmp_path)
    dataset = folder_dataset(tmp_path, metainfo=dict(classes=('oak', 'elm', 'ash')))
    (warning,) = only(config(dataset, 'mmpretrain')).warnings
    assert warning.startswith("label 0 is the folder 'ash', and 'oak' in metainfo.classes")
    # Names for people are no order.
    dataset['metainfo']['classes'] = ('Fraxinus', 'Ulmus', 'Quercus')
    assert not only(config(dataset, 'mmpretrain')).warnings


def test_a_list_whose_labels_contradict_its_folders(tmp_path: Path) -> None:
    make_folders(tmp_path)
    (tmp_path / 'list.txt').write_text('ash/a.jpg 0\nelm/a.jpg 2\noak/a.jpg 1\n')
    dataset = folder_dataset(
        tmp_path, ann_file=str(tmp_path / 'list.txt'), metainfo=dict(classes=('ash', 'elm', 'oak'))
    )
    (warning,) = only(config(dataset, 'mmpretrain')).warnings
    assert warning.startswith('2 × images in the folder of a class that is not their label')
    assert "elm/a.jpg 2 ('oak')" in warning


def test_masks_of_0_and_255(labels: Path) -> None:
    for path in (labels / 'ann').iterdir():
        Image.fromarray(np.where(np.arange(64) < 20, 255, np.zeros(SIZE)).astype('uint8')).save(
            path
        )
    cfg = config(label_dataset(labels), 'mmseg')
    (warning,) = only(cfg).warnings
    assert warning.startswith('the label maps hold 0 and 255 alone, and 255 means "no class"')
    assert any(e.startswith('the label maps hold 0 and 255') for e in only(cfg, True).errors)


def test_what_a_head_ignores(labels: Path) -> None:
    head = dict(num_classes=3, ignore_index=1)
    found = only(config(label_dataset(labels), 'mmseg', model=dict(decode_head=head)))
    assert "ignore_index=1 of a head: the pixels of 'road' are not learned" in found.warnings
    # Numbers that a head ignores are no wrong ones.
    for path in (labels / 'ann').iterdir():
        pixels = np.asarray(Image.open(path)).copy()
        pixels[pixels == 255] = 250
        Image.fromarray(pixels).save(path)
    head['ignore_index'] = 250
    assert not only(config(label_dataset(labels), 'mmseg', model=dict(decode_head=head))).errors


@pytest.mark.parametrize(
    ('crop', 'size', 'small'),
    [
        ((32, 48), (64, 64), True),
        (32, (32, 64), True),
        ((64, 64), (64, 64), False),
        ((64, 64), None, False),
    ],
)
def test_crops_that_are_padded(labels: Path, crop: object, size: object, small: bool) -> None:
    dataset = label_dataset(labels)
    dataset['pipeline'].insert(2, dict(type='mmseg.RandomCrop', crop_size=crop))
    model = dict(data_preprocessor=dict(size=size))
    warnings = only(config(dataset, 'mmseg', model=model)).warnings
    assert [w.partition(' cuts')[0] for w in warnings] == ['RandomCrop'] * small
    if small:
        assert re.search(r'set model\.data_preprocessor\.size=\(32, \d\d\)$', warnings[0])


def test_label_maps_of_validation_mean_the_same(labels: Path) -> None:
    other = label_dataset(labels, metainfo=dict(classes=('road', 'sky', 'tree')))
    cfg = config(label_dataset(labels), 'mmseg')
    cfg.val_dataloader = dict(dataset=other)
    _, found = check_annotations(cfg, ('train', 'val'), thorough=False)
    assert found.errors[0].startswith("label 0 is 'road' here and 'sky' in train_dataloader")


def corners(ann: dict) -> None:
    x, y, w, h = ann['bbox']
    ann['bbox'] = [x, y, x + w, y + h]


def test_corners_as_boxes(boxes: Path) -> None:
    (error,) = changed(boxes, corners).errors
    assert error.startswith('8 × boxes that are (x1, y1, x2, y2) according to their mask or area')
    pipeline = [dict(type='LoadAnnotations', with_bbox=True)]

    def alone(ann: dict) -> None:
        corners(ann)
        ann['segmentation'] = []

    (error,) = changed(boxes, alone, pipeline=pipeline).errors
    assert error.startswith('8 × boxes that are (x1, y1, x2, y2)')


def test_a_single_box_elsewhere_is_no_reason_to_refuse(boxes: Path) -> None:
    def change(ann: dict) -> None:
        if ann['id'] == 3:
            ann['bbox'] = [40, 2, 20, 6]

    found = changed(boxes, change)
    assert not found.errors
    (warning,) = found.warnings
    assert warning.startswith('1 × boxes that are not around their mask')
    assert 'annotation 3 [40, 2, 20, 6]' in warning


@pytest.mark.parametrize('key', ['image_id', 'category_id'])
def test_ids_as_texts_come_first(boxes: Path, key: str) -> None:
    first, *_ = changed(boxes, lambda ann: ann.update({key: str(ann[key])})).errors
    assert first.startswith(f'8 × annotations whose {key} is a text but the ids of ')
    assert "('1')" in first


def test_boxes_alone_are_refused_with_the_way(boxes: Path) -> None:
    first, *_ = changed(boxes, lambda ann: ann.update(segmentation=[])).errors
    assert 'the config loads masks: to train boxes alone, inherit a config of boxes' in first
    pipeline = [dict(type='LoadAnnotations', with_bbox=True)]
    found = changed(boxes, lambda ann: ann.update(segmentation=[]), pipeline=pipeline)
    assert not found.errors


def test_advice_can_be_pasted(boxes: Path) -> None:
    content = coco()
    content['categories'][0]['name'] = 'cat '
    write(boxes, content)
    warnings = only(config(coco_dataset(boxes))).warnings
    assert any("classes=('dog',)" in w for w in warnings)
    assert any("'cat' is nearly 'cat '" in w for w in warnings)


def test_numbers_that_mmdet_loads(boxes: Path) -> None:
    content = coco()
    for image in content['images']:
        image.update(height=float(image['height']), width=float(image['width']))
    content['annotations'][0]['area'] = float('nan')
    write(boxes, content)
    assert not only(config(coco_dataset(boxes)), thorough=True).errors


def test_a_large_picture_is_none_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / 'tile.png')
    picture(0).save(path)
    # As an aerial image of 190 million pixels.
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    found = read_image(path)
    assert (found.problem, found.size) == (None, None)
    Path(path).write_bytes(Path(path).read_bytes()[:100])
    assert 'damaged' in read_image(path).problem
