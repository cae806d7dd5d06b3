"""Labels that mean something else: each is said, most of it before a training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from pycocotools.mask import encode

from mmvttt.openmmlab.reliability.data.annotations import check_annotations
from mmvttt.openmmlab.reliability.data.coco import _reading
from mmvttt.openmmlab.reliability.data.findings import Findings
from mmvttt.openmmlab.reliability.data.images import read_image

from .sets import (
    SIZE,
    annotation,
    coco,
    coco_dataset,
    config,
    folder_dataset,
    label_dataset,
    make_folders,
    picture,
    write,
)

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
pytest.importorskip('mmpretrain')


def only(cfg: Config, thorough: bool = False) -> Findings:
    (report,) = check_annotations(cfg, ('train',), thorough=thorough)
    return report


def changed(root: Path, change: Callable[[dict], object], **dataset: object) -> Findings:
    content = coco()
    for ann in content['annotations']:
        change(ann)
    write(root, content)
    return only(config(coco_dataset(root, **dataset)))


TWO, FEW, MANY = dict(num_classes=2), dict(num_classes=1), dict(num_classes=80)
# The model's heads, the metric, the key of the head that is named, and whether it is an error.
HEADS: list[tuple[dict, str, str, bool]] = [
    (dict(roi_head=dict(mask_head=FEW)), '', 'roi_head.mask_head', True),
    (dict(roi_head=dict(bbox_head=[TWO, FEW])), '', 'roi_head.bbox_head.1', True),
    (dict(panoptic_head=dict(num_things_classes=1)), '', 'panoptic_head', True),
    (dict(bbox_head=FEW), '', 'bbox_head', True),
    # With more classes than the data, the first validation would end in an IndexError.
    (dict(roi_head=dict(bbox_head=MANY)), 'CocoMetric', 'roi_head.bbox_head', True),
    (dict(bbox_head=MANY), 'mmdet.CocoMetric', 'bbox_head', True),
    (dict(mask_head=MANY), 'CocoMetric', 'mask_head', True),
    (dict(roi_head=dict(mask_head=MANY)), 'CocoMetric', 'roi_head.mask_head', False),
    (dict(bbox_head=MANY), 'VOCMetric', 'bbox_head', False),
    (dict(bbox_head=MANY, language_model=dict()), 'CocoMetric', 'bbox_head', False),
    (dict(bbox_head=MANY, mask_head=dict(FEW, class_agnostic=True)), '', 'bbox_head', False),
]


@pytest.mark.parametrize(('heads', 'metric', 'place', 'fatal'), HEADS)
def test_every_head_of_a_detector(
    boxes: Path, heads: dict, metric: str, place: str, fatal: bool
) -> None:
    write(boxes, coco())
    evaluator = dict(val_evaluator=dict(type=metric)) if metric else {}
    report = only(config(coco_dataset(boxes), model=heads, **evaluator))
    (text,) = report.errors if fatal else report.warnings
    assert bool(report.errors) == fatal
    assert text.startswith(f'model.{place} has num_classes=')
    assert ' for 2 classes of the data: ' in text
    assert ('set num_classes=2 in all heads' in text) == fatal


def test_auxiliary_heads_of_a_segmentor(labels: Path) -> None:
    heads = dict(decode_head=dict(num_classes=3), auxiliary_head=[dict(num_classes=2)])
    errors = only(config(label_dataset(labels), 'mmseg', model=heads)).errors
    assert errors[0].startswith('model.auxiliary_head.0 has num_classes=2 for 3 classes')


def test_one_hot_labels_of_another_length(tmp_path: Path) -> None:
    make_folders(tmp_path)
    model = dict(head=dict(num_classes=3), data_preprocessor=dict(num_classes=1000))
    (error,) = only(config(folder_dataset(tmp_path), 'mmpretrain', model=model)).errors
    words = 'model.data_preprocessor.num_classes is 1000, and model.head.num_classes 3'
    assert error.startswith(words)


def test_folders_in_another_order_than_the_classes(tmp_path: Path) -> None:
    make_folders(tmp_path)
    dataset = folder_dataset(tmp_path, metainfo=dict(classes=('oak', 'elm', 'ash')))
    (warning,) = only(config(dataset, 'mmpretrain')).warnings
    assert warning.startswith("label 0 is the folder 'ash', and 'oak' in metainfo.classes")
    # Names for people are no order.
    dataset['metainfo']['classes'] = ('Fraxinus', 'Ulmus', 'Quercus')
    assert not only(config(dataset, 'mmpretrain')).warnings


@pytest.mark.parametrize(
    ('numbers', 'classes', 'wrong'),
    [
        ((0, 255), ('sky', 'road'), True),
        ((0, 255), ('sky', 'road', 'tree'), True),
        ((255,), ('sky', 'road'), True),
        ((0, 1, 255), ('sky', 'road'), False),
        ((0, 1), ('sky', 'road'), False),
        ((0,), ('sky', 'road'), False),
        ((0, 255), ('sky',), False),
    ],
)
def test_masks_of_0_and_255(
    labels: Path, numbers: tuple[int, ...], classes: tuple[str, ...], wrong: bool
) -> None:
    for path in (labels / 'ann').iterdir():
        Image.fromarray(np.resize(np.array(numbers, np.uint8), SIZE)).save(path)
    cfg = config(label_dataset(labels, metainfo=dict(classes=classes)), 'mmseg')
    said = [w for w in only(cfg).warnings if 'masks of 0 and 255 need 1 instead of 255' in w]
    assert len(said) == wrong
    assert any('masks of 0 and 255' in e for e in only(cfg, True).errors) == wrong


def test_what_a_head_ignores(labels: Path) -> None:
    head = dict(num_classes=3, ignore_index=1)
    report = only(config(label_dataset(labels), 'mmseg', model=dict(decode_head=head)))
    assert "ignore_index=1 of a head: the pixels of 'road' are not learned" in report.warnings
    # Numbers that a head ignores are no wrong ones.
    for path in (labels / 'ann').iterdir():
        pixels = np.asarray(Image.open(path)).copy()
        pixels[pixels == 255] = 250
        Image.fromarray(pixels).save(path)
    head['ignore_index'] = 250
    assert not only(config(label_dataset(labels), 'mmseg', model=dict(decode_head=head))).errors


BOXES_ALONE = dict(pipeline=[dict(type='LoadAnnotations', with_bbox=True)])


@pytest.mark.parametrize('with_masks', [True, False])
@pytest.mark.parametrize(('number', 'fatal'), [(5, True), (4, False)])
def test_corners_as_boxes(boxes: Path, with_masks: bool, number: int, fatal: bool) -> None:
    """More than half are an error; a few areas may agree by chance, and a few masks do not."""

    def change(ann: dict) -> None:
        x, y, w, h = ann['bbox']
        if ann['id'] <= number:
            ann['bbox'] = [x, y, x + w, y + h]
        if not with_masks:
            ann['segmentation'] = []

    report = changed(boxes, change, **({} if with_masks else BOXES_ALONE))
    words = f'{number} × boxes that are (x1, y1, x2, y2) according to their mask or area'
    assert [text.startswith(words) for text in report.errors] == [True] * fatal
    warned = any(text.startswith(words) for text in report.warnings)
    assert warned == (with_masks and not fatal)


@pytest.mark.parametrize(
    ('box', 'area', 'mask', 'reading'),
    [
        # Corners of a mask 16 × 20 may be off by a pixel and 2 % of its longer side.
        ([4, 6, 21.3, 26], 1, [4, 6, 20, 6, 20, 26, 4, 26], 'x1, y1, x2, y2'),
        ([4, 6, 21.5, 26], 1, [4, 6, 20, 6, 20, 26, 4, 26], ''),
        # A box may be larger than the mask of what is visible, and cut off a little of it.
        ([0, 0, 40, 40], 1, [4, 6, 20, 6, 20, 26, 4, 26], ''),
        ([4, 10, 16, 16], 1, [4, 6, 20, 6, 20, 26, 4, 26], ''),
        ([4, 11, 16, 15], 1, [4, 6, 20, 6, 20, 26, 4, 26], 'do not hold their mask'),
        # Without a mask, the area of (4, 6, 20, 26) as corners may be off by 1 %.
        ([4, 6, 20, 26], 320 * 1.009, [], 'x1, y1, x2, y2'),
        ([4, 6, 20, 26], 320 * 1.012, [], ''),
        # Both readings of the box have this area.
        ([0, 0, 20, 26], 20 * 26, [], ''),
        ([4, 6, 20, 26], 0, [], None),
    ],
)
def test_how_a_box_is_read(box: list, area: float, mask: list, reading: str | None) -> None:
    ann = dict(bbox=box, area=area, segmentation=[mask] if mask else [])
    found = _reading(ann, SIZE, False)
    assert found == reading or (reading and reading in found)
    if mask:
        x1, y1, x2, y2 = min(mask[::2]), min(mask[1::2]), max(mask[::2]), max(mask[1::2])
        pixels = np.zeros(SIZE, np.uint8, order='F')
        pixels[y1:y2, x1:x2] = 1
        rle = encode(pixels)
        ann['segmentation'] = dict(rle, counts=rle['counts'].decode())
        assert _reading(ann, SIZE, True) == found


def test_what_the_data_set_leaves_out(boxes: Path) -> None:
    """Filters and limits are those of the data set and the model."""
    content = coco()
    content['images'][1].update(height=20)
    for number in range(30):
        content['annotations'].append(annotation(99 + number, 2, [number, 2, 8, 40], 1))
    write(boxes, content)
    data = coco_dataset(boxes, filter_cfg=dict(min_size=32))
    for model, option, most in (
        (dict(test_cfg=dict(rcnn=dict(max_per_img=31))), 'model.test_cfg.rcnn.max_per_img', 31),
        (dict(num_queries=32), None, 32),
    ):
        cfg = config(data, model=model)
        (report,) = check_annotations(cfg, ('train',), thorough=False, images=False)
        assert not report.errors
        small = '1 of 4 pictures are too small: a side is below filter_cfg.min_size=32'
        assert report.warnings[0].startswith(small)
        many = [text for text in report.warnings if text.startswith('1 pictures have more objects')]
        assert len(many) == (option is not None)
        assert all(
            'up to 32, than the model returns' in m and f'{option}={most}' in m for m in many
        )
        expected = 'cat: 34 listed, 33 learned (1 in pictures that are left out)'
        assert report.account[0] == expected


@pytest.mark.parametrize('key', ['image_id', 'category_id'])
def test_ids_as_texts_come_first(boxes: Path, key: str) -> None:
    first, *_ = changed(boxes, lambda ann: ann.update({key: str(ann[key])})).errors
    assert first.startswith(f'8 × annotations whose {key} is a text but the ids of ')
    assert "('1')" in first


def test_boxes_alone_are_refused_with_the_way(boxes: Path) -> None:
    first, *_ = changed(boxes, lambda ann: ann.update(segmentation=[])).errors
    assert 'the config loads masks: to train boxes alone, inherit a config of boxes' in first
    assert not changed(boxes, lambda ann: ann.update(segmentation=[]), **BOXES_ALONE).errors


def test_numbers_that_mmdet_loads(boxes: Path) -> None:
    content = coco()
    for image in content['images']:
        image.update(height=float(image['height']), width=float(image['width']))
    content['annotations'][0]['area'] = float('nan')
    write(boxes, content)
    assert not only(config(coco_dataset(boxes)), thorough=True).errors


def test_a_large_picture_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / 'tile.png')
    picture(0).save(path)
    # As an aerial image of 190 million pixels.
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    facts = read_image(path)
    assert (facts.problem, facts.size) == (None, None)


def test_pictures_that_are_learned_and_measured(boxes: Path, labels: Path, tmp_path: Path) -> None:
    write(boxes, coco())
    make_folders(tmp_path / 'folders')
    for dataset, scope, words in (
        (coco_dataset(boxes), 'mmdet', '4 of 4 pictures are also in train_dataloader.dataset'),
        (label_dataset(labels), 'mmseg', '3 of 3 pictures are also in train_dataloader.dataset'),
        (folder_dataset(tmp_path / 'folders'), 'mmpretrain', 'is also read by train_dataloader'),
    ):
        cfg = config(dataset, scope)
        # As the same set without augmentation.
        cfg.val_dataloader = dict(dataset=dict(dataset, test_mode=True))
        _, report = check_annotations(cfg, ('train', 'val'), thorough=False)
        assert [w for w in report.warnings if words in w], report
        cfg.train_dataloader, cfg.test_dataloader = None, cfg.val_dataloader
        assert not [w for f in check_annotations(cfg, thorough=False) for w in f.warnings]
    (tmp_path / 'link').symlink_to(boxes)
    cfg = config(coco_dataset(boxes))
    cfg.val_dataloader = dict(dataset=coco_dataset(tmp_path / 'link'))
    _, report = check_annotations(cfg, ('train', 'val'), thorough=False)
    assert '4 of 4 pictures' in report.warnings[0]
    cfg.train_dataloader.dataset.indices, cfg.val_dataloader.dataset.indices = [0, 1], [2, 3]
    _, report = check_annotations(cfg, ('train', 'val'), thorough=False)
    assert not report.warnings


@pytest.mark.parametrize(
    ('loss', 'fatal'),
    [
        (None, True),
        (dict(type='CrossEntropyLoss'), True),
        (dict(type='mmseg.CrossEntropyLoss', use_sigmoid=True), False),
        ([dict(type='CrossEntropyLoss'), dict(type='DiceLoss')], False),
    ],
)
def test_a_softmax_over_one_class(labels: Path, tmp_path: Path, loss: object, fatal: bool) -> None:
    for path in (labels / 'ann').iterdir():
        Image.fromarray(np.zeros(SIZE, np.uint8)).save(path)
    make_folders(tmp_path / 'folders', ('ash',))
    given = {} if loss is None else dict(loss_decode=loss, loss=loss)
    for dataset, scope, head in (
        (label_dataset(labels, metainfo=dict(classes=('sky',))), 'mmseg', 'decode_head'),
        (folder_dataset(tmp_path / 'folders'), 'mmpretrain', 'head'),
    ):
        report = only(config(dataset, scope, model={head: dict(num_classes=1, **given)}))
        assert (
            any(f'model.{head} has num_classes=1 and a softmax' in e for e in report.errors)
            == fatal
        )


@pytest.mark.parametrize(
    ('names', 'fatal'), [(('train', 'val'), True), (('Images',), True), (('oak', 'test'), False)]
)
def test_parts_of_the_data_as_classes(tmp_path: Path, names: tuple[str, ...], fatal: bool) -> None:
    make_folders(tmp_path, names)
    report = only(config(folder_dataset(tmp_path), 'mmpretrain'))
    assert [
        t for t in (report.errors if fatal else report.warnings) if 'each would be a class' in t
    ]
    assert bool(report.errors) == fatal


def test_pictures_that_nobody_reads(labels: Path, tmp_path: Path) -> None:
    make_folders(tmp_path / 'folders')
    for folder, suffixes in (
        (labels / 'img', ('.JPG', '.webp')),
        (tmp_path / 'folders/ash', ('.webp',)),
    ):
        for suffix in suffixes:
            picture(0).save(folder / f'x{suffix}', 'JPEG')
    (warning,) = only(config(label_dataset(labels), 'mmseg')).warnings
    assert warning.startswith('2 × pictures that are not read, because their names do not end in')
    # Label maps beside the images are read.
    both = dict(img_path='img', seg_map_path='img')
    dataset = label_dataset(labels, data_prefix=both, img_suffix='.JPG', seg_map_suffix='.png')
    (warning,) = only(config(dataset, 'mmseg')).warnings
    assert warning.startswith('1 × pictures that are not read')
    picture(0).save(tmp_path / 'folders/ash/y.Png')
    (warning,) = only(config(folder_dataset(tmp_path / 'folders'), 'mmpretrain')).warnings
    assert warning.startswith('1 × pictures that are not read')


def test_perfect_predictions_are_perfect(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluates a file with ids from 0 and without `info`."""
    from mmdet.evaluation import CocoMetric
    from pycocotools.coco import COCO

    content = coco()
    for number, ann in enumerate(content['annotations']):
        ann['id'] = number
    load = COCO.loadRes
    # As in pycocotools 2.0.10.
    monkeypatch.setattr(COCO, 'loadRes', lambda self, r: (self.dataset['info'], load(self, r))[1])
    write(boxes, content)
    metric = CocoMetric(ann_file=str(boxes / 'a.json'), metric='bbox')
    metric.dataset_meta = dict(classes=('cat', 'dog'))
    for image in content['images']:
        own = [ann for ann in content['annotations'] if ann['image_id'] == image['id']]
        corners_of = torch.tensor([ann['bbox'] for ann in own]).float()
        corners_of[:, 2:] += corners_of[:, :2]
        predictions = dict(
            bboxes=corners_of,
            scores=torch.ones(len(own)),
            labels=torch.tensor([ann['category_id'] - 1 for ann in own]),
        )
        size = (image['height'], image['width'])
        sample = dict(img_id=image['id'], ori_shape=size, pred_instances=predictions)
        metric.process({}, [sample])
    assert metric.evaluate(4)['coco/bbox_mAP'] == pytest.approx(1)
