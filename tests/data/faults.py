"""Faults of data sets: what makes each, what check_data says of it, and whether it is an error.

The check before a training finds the same errors, except for those of `THOROUGH`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mmengine.config import Config
from PIL import Image

from .sets import SIZE, annotation, coco, make_folders, picture, write

# Damages a set without a fault, or its config.
Make = Callable[[Path, Config], object]
Fault = tuple[Make, str, bool]
AREA = SIZE[0] * SIZE[1]
# The annotation, of image 1 and class 'dog', that has the fault.
WHICH = 3


def content(change: Callable[[dict], object]) -> Make:
    """Changes the content of the annotation file."""

    def make(root: Path, cfg: Config) -> None:
        whole = coco()
        change(whole)
        write(root, whole)

    return make


def data(**changes: object) -> Make:
    return lambda root, cfg: cfg.train_dataloader.dataset.update(changes)


def model(**parts: object) -> Make:
    return lambda root, cfg: cfg.update(model=parts)


def both(*makes: Make) -> Make:
    return lambda root, cfg: [make(root, cfg) for make in makes]


def every(change: Callable[[dict], object]) -> Make:
    return content(lambda c: [change(ann) for ann in c['annotations']])


def boxes(change: Callable[..., list], count: int = 8) -> Make:
    return content(
        lambda c: [ann.update(bbox=change(*ann['bbox'])) for ann in c['annotations'][:count]]
    )


def one(**changes: object) -> Make:
    """Changes one annotation."""
    return content(lambda c: c['annotations'][WHICH].update(changes))


def without(key: str) -> Make:
    return content(lambda c: c['annotations'][WHICH].pop(key))


def rle(counts: object, size: tuple[int, int] = SIZE) -> Make:
    return one(segmentation=dict(size=list(size), counts=counts))


def raw(text: bytes) -> Make:
    return lambda root, cfg: (root / 'a.json').write_bytes(text)


BOXES_ALONE = data(pipeline=[dict(type='LoadAnnotations', with_bbox=True)])
NO_MASKS = every(lambda a: a.update(segmentation=[]))
NAMED = rf': (annotation|id) {WHICH + 1}(\W|$)'
NOT_AROUND = 'not around their mask'
TWO, FEW, MANY = dict(num_classes=2), dict(num_classes=1), dict(num_classes=80)


def corners(x: float, y: float, w: float, h: float) -> list[float]:
    return [x, y, x + w, y + h]


def heads(place: str, fatal: bool, metric: str = '', **parts: object) -> Fault:
    def make(root: Path, cfg: Config) -> None:
        cfg.update(model=parts, val_evaluator=dict(type=metric) if metric else None)

    return make, f'model.{place} has num_classes=.* for 2 classes', fatal


OF_BOXES: dict[str, Fault] = {
    # Values of one annotation.
    **{
        f'{key}={value!r:.20}': (one(**{key: value}), f'{key} is missing or not .*{NAMED}', True)
        for key, value in (
            ('bbox', ['4', '6', '16', '20']),
            ('bbox', [float('nan'), 6, 16, 20]),
            ('bbox', [1, 2, 3]),
            # More than any float can hold, which JSON may.
            ('bbox', [10**400, 6, 16, 20]),
            ('category_id', [1]),
            ('area', 'large'),
            ('iscrowd', '0'),
            ('ignore', 'no'),
            ('segmentation', [[float('nan')] * 6]),
            ('segmentation', [1, 2, 3, 4, 5, 6]),
            ('segmentation', 'mask'),
        )
    },
    **{
        f'no {key}': (without(key), f'{key} is missing', True)
        for key in ('image_id', 'category_id', 'bbox', 'area', 'id')
    },
    'category_id=99': (one(category_id=99), f'category_id is not listed.*{NAMED}', False),
    'image_id=77': (one(image_id=77), f'image_id is not listed.*{NAMED}', False),
    **{
        f'{key} as texts': (
            every(lambda ann, key=key: ann.update({key: str(ann[key])})),
            rf"8 × .*{key} is not listed.*\('1'\)",
            True,
        )
        for key in ('image_id', 'category_id')
    },
    # What is not learned, and why.
    **{
        why: (make, rf'dog: 4 listed, 3 learned \(1 {why}\)', False)
        for why, make in (
            ('crowds', one(iscrowd=1)),
            ('without area', one(area=0)),
            ('outside their image', one(bbox=[64, 6, 9, 9], segmentation=[[64, 6, 73, 6, 73, 15]])),
            ('with a mask of fewer than three points', one(segmentation=[[1, 2, 3, 4]])),
        )
    },
    'zero width': (one(bbox=[4, 6, 0, 20]), f'not learned, without area{NAMED}', False),
    'empty polygons': (every(lambda a: a.update(segmentation=[[]])), 'no box to learn', True),
    'a class of crowds': (
        every(lambda a: a['category_id'] == 1 and a.update(iscrowd=1)),
        r"nothing is learned: 'cat' \(4 crowds",
        False,
    ),
    'an ignored class': (
        every(lambda a: a['category_id'] == 1 and a.update(ignore=1)),
        r"nothing is learned: 'cat' \(4 marked ignore",
        False,
    ),
    'a class without a box': (
        every(lambda a: a.update(category_id=2)), r"nothing is learned: 'cat' \(none", False
    ),
    'a class that is not in the file': (
        data(metainfo=dict(classes=('cat', 'dog', 'cow'))), "nothing is learned: 'cow'", False
    ),
    'a category that is no class': (
        data(metainfo=dict(classes=('cat',))), 'dropped.*: dog', False
    ),
    'a small picture': (
        both(
            content(lambda c: c['images'][1].update(height=20)),
            lambda root, cfg: picture(1, (20, 64)).save(root / 'images/1.jpg'),
            data(filter_cfg=dict(min_size=32)),
        ),
        r"2 × .*not learned, in pictures .*'min_size': 32.*: annotation 3, annotation 4",
        False,
    ),
    'more objects than are returned': (
        both(
            content(
                lambda c: c['annotations'].extend(
                    annotation(99 + i, 2, [i, 2, 8, 40], 1) for i in range(30)
                )
            ),
            model(test_cfg=dict(rcnn=dict(max_per_img=31))),
        ),
        r'1 × pictures with more objects .* model.test_cfg.rcnn.max_per_img=31: id 2 \(32\)',
        False,
    ),
    'an image without a box': (
        content(lambda c: c.update(annotations=c['annotations'][2:])),
        '1 × images without a box: 0.jpg',
        False,
    ),
    # Masks.
    'no mask': (without('segmentation'), f'boxes without a mask.*{NAMED}', True),
    'no masks': (NO_MASKS, '8 × boxes without a mask.*inherit a config of boxes', True),
    **{
        f'RLE, {name}': (make, f'do not fill their image{NAMED}', True)
        for name, make in (
            ('other size', rle([30], (5, 6))),
            ('short', rle([AREA - 1])),
            ('cut', rle('PbX')),
            ('no RLE', rle('no mask at all')),
            ('nothing', rle(None)),
        )
    },
    # Conventions.
    'fractions': (
        every(
            lambda a: a.update(
                bbox=[v / 64 for v in a['bbox']],
                area=a['area'] / 64**2,
                segmentation=[[v / 64 for v in a['segmentation'][0]]],
            )
        ),
        r'fractions of the picture .* multiply them',
        True,
    ),
    **{
        name: (make, f'{count} × .*{NOT_AROUND}', count > 4)
        for name, count, make in (
            ('corners', 8, boxes(corners)),
            ('five corners', 5, boxes(corners, 5)),
            ('four corners', 4, boxes(corners, 4)),
        )
    },
    **{
        name: (
            both(BOXES_ALONE, every(lambda a, f=change: a.update(segmentation=[], bbox=f(a)))),
            rf'{count} × .*reach beyond their image',
            count > 1,
        )
        for name, count, change in (
            ('corners alone', 4, lambda a: corners(a['bbox'][0] + 9, *a['bbox'][1:])),
            ('a box beyond', 1, lambda a: [51 if a['id'] == 4 else 9, *a['bbox'][1:]]),
        )
    },
    # The lists.
    'an object twice': (
        # The second half a pixel apart; the last two have another category, and another image.
        content(
            lambda c: c['annotations'].extend(
                {**c['annotations'][0], 'id': 99 + i, **other}
                for i, other in enumerate(
                    ({}, dict(bbox=[4.5, 6.5, 16.5, 20.5]), dict(category_id=2), dict(image_id=3))
                )
            )
        ),
        '3 annotations have the image, category and box of another one',
        False,
    ),
    'the same id twice': (
        content(lambda c: c['annotations'][1].update(id=1)), 'ids of several annotations: 1', True
    ),
    'the same image id twice': (
        content(lambda c: c['images'][1].update(id=0)), 'ids of several images: 0', True
    ),
    'a picture twice': (
        content(lambda c: c['images'][1].update(file_name='0.jpg')),
        'file_names of several images: .0.jpg',
        False,
    ),
    'a name twice': (
        content(lambda c: c['categories'].append(dict(id=9, name='cat'))),
        "names of several categories: 'cat'",
        True,
    ),
    'id 0': (content(lambda c: c['annotations'][0].update(id=0)), 'the id 0', False),
    **{
        f'an image with {key}={value!r}': (
            content(lambda c, key=key, value=value: c['images'][2].update({key: value})),
            rf'{key} is .*not {allowed}: id 2 ',
            True,
        )
        for key, value, allowed in (
            ('height', 0, 'an integer above 0'),
            ('file_name', 'a\0.jpg', 'a text'),
        )
    },
    'a number for an image': (
        content(lambda c: c['images'].append(5)), 'id is missing.*: number 4', True
    ),
    'a number as a category name': (
        content(lambda c: c['categories'].append(dict(id=9, name=7))),
        r'name is .*not a text: id 9 \(7\)',
        True,
    ),
    'no categories': (content(lambda c: c['categories'].clear()), 'no class of metainfo', True),
    'no images': (content(lambda c: c['images'].clear()), 'image_id is not listed', True),
    'no annotations': (content(lambda c: c['annotations'].clear()), 'no box to learn', True),
    # The file.
    **{
        f'a file of {value!r}': (raw(json.dumps(value).encode()), 'a.json has no list', True)
        for value in (None, 3, [], {}, {'images': []}, dict(coco(), annotations=None))
    },
    **{
        f'a file of {value[:20]!r}': (raw(value), 'a.json is not JSON', True)
        for value in (b'', b'{"images": [', b'\xff', b'[' * 10**5)
    },
    'no file': (data(ann_file=''), 'is not a file', True),
    'a folder as the file': (data(ann_file='images'), 'is not a file', True),
    'classes without a comma': (data(metainfo=dict(classes='cat')), r"classes=\('cat',\)", True),
    # The model. With more classes than the data, CocoMetric would end in an IndexError.
    **{
        f'heads {number}': fault
        for number, fault in enumerate(
            (
                heads('roi_head.mask_head', True, roi_head=dict(mask_head=FEW)),
                heads('roi_head.bbox_head.1', True, roi_head=dict(bbox_head=[TWO, FEW])),
                heads('panoptic_head', True, panoptic_head=dict(num_things_classes=1)),
                heads('bbox_head', True, bbox_head=FEW),
                heads('roi_head.bbox_head', True, 'CocoMetric', roi_head=dict(bbox_head=MANY)),
                heads('bbox_head', True, 'mmdet.CocoMetric', bbox_head=MANY),
                heads('mask_head', True, 'CocoMetric', mask_head=MANY),
                heads('roi_head.mask_head', False, 'CocoMetric', roi_head=dict(mask_head=MANY)),
                heads('bbox_head', False, 'VOCMetric', bbox_head=MANY),
                heads('bbox_head', False, 'CocoMetric', bbox_head=MANY, language_model=dict()),
                heads('bbox_head', False, bbox_head=MANY, mask_head=dict(FEW, class_agnostic=True)),
            )
        )
    },
    # Pictures.
    '12 of 16 bits': (
        lambda root, cfg: Image.fromarray(np.full(SIZE, 4095, np.uint16)).save(
            root / 'images/0.jpg', 'PNG'
        ),
        '15 of 255',
        False,
    ),
    **{
        name: (make, f'1 × .*{kind}.*0.jpg', True)
        for name, kind, make in (
            (
                'floating-point numbers',
                'floating-point',
                lambda root, cfg: Image.fromarray(np.ones(SIZE, np.float32)).save(
                    root / 'images/0.jpg', 'TIFF'
                ),
            ),
            ('text', 'not images', lambda root, cfg: (root / 'images/0.jpg').write_text('no')),
            ('nothing', 'empty', lambda root, cfg: (root / 'images/0.jpg').write_text('')),
        )
    },
    'a missing picture': (
        lambda root, cfg: (root / 'images/0.jpg').unlink(), 'do not exist', True
    ),
}  # fmt: skip


def maps(*numbers: int) -> Make:
    """Label maps of these numbers."""

    def make(root: Path, cfg: Config) -> None:
        for path in (root / 'ann').iterdir():
            Image.fromarray(np.resize(np.array(numbers, np.uint8), SIZE)).save(path)

    return make


def damaged(change: Callable[[Path], object], words: str) -> Fault:
    return lambda root, cfg: change(root / 'ann/1.png'), f'{words}.*ann/1.png', True


def classes(*names: str) -> Make:
    return data(metainfo=dict(classes=names))


ONE_CLASS = both(maps(0), classes('sky'))
OF_LABELS: dict[str, Fault] = {
    'no map': damaged(Path.unlink, 'do not exist'),
    'text': damaged(lambda path: path.write_text('labels'), 'not label maps'),
    'colours': damaged(lambda path: picture(0).save(path), 'several channels'),
    'a number of 300': damaged(
        lambda path: Image.fromarray(np.full(SIZE, 300, np.uint16)).save(path), 'above 255'
    ),
    'a map of another size': (
        lambda root, cfg: Image.fromarray(np.zeros((24, 32), np.uint8)).save(root / 'ann/1.png'),
        'another size than annotated: .*img/1.png',
        True,
    ),
    'truncated': damaged(lambda path: path.write_bytes(path.read_bytes()[:-40]), 'truncated'),
    'no such suffix': (data(img_suffix='.tif'), r'no image \*.tif .*img_suffix', True),
    'other suffixes': (
        lambda root, cfg: [
            picture(0).save(root / f'img/x{suffix}', 'JPEG') for suffix in ('.JPG', '.webp')
        ],
        '2 × pictures that are not read',
        False,
    ),
    'a class without a pixel': (
        classes('sky', 'road', 'tree', 'car'), r"classes without a pixel: 'car' \(3\)", False
    ),
    'classes of another set': (
        data(type='ADE20KDataset', metainfo=dict(classes=('no class',))), 'cannot be built', True
    ),
    'a small head': (
        model(decode_head=dict(num_classes=3), auxiliary_head=[dict(num_classes=2)]),
        'model.auxiliary_head.0 has num_classes=2 for 3 classes',
        True,
    ),
    'an ignored class': (
        both(maps(0, 1, 2), model(decode_head=dict(num_classes=3, ignore_index=1))),
        "ignore_index=1 .*'road'",
        False,
    ),
    **{
        f'{numbers} for {names}': (both(maps(*numbers), classes(*names)), '255 need 1', True)
        for numbers, names in (((0, 255), ('sky', 'road')), ((255,), ('sky', 'road')))
    },
    'a softmax over one class': (
        both(ONE_CLASS, model(decode_head=FEW)), 'decode_head has num_classes=1 and a softmax', True
    ),
    'colours that a transform may translate': (
        both(
            lambda root, cfg: cfg.train_dataloader.dataset.pipeline.insert(2, dict(type='Mine')),
            lambda root, cfg: picture(0).save(root / 'ann/1.png'),
        ),
        'not checked: Mine may change them',
        False,
    ),
}  # fmt: skip


def folders(*names: str) -> Make:
    def make(root: Path, cfg: Config) -> None:
        for path in root.iterdir():
            path.rename(root.parent / path.name)
        make_folders(root, names)

    return make


def listed(line: str) -> Make:
    def make(root: Path, cfg: Config) -> None:
        (root.parent / 'list.txt').write_text(f'ash/a.jpg 0\n{line}\n')
        cfg.train_dataloader.dataset.ann_file = str(root.parent / 'list.txt')

    return make


OF_FOLDERS: dict[str, Fault] = {
    'a picture of text': (
        lambda root, cfg: (root / 'elm/a.jpg').write_text('no'), 'not images', True
    ),
    'empty folders': (
        lambda root, cfg: [path.unlink() for path in root.rglob('*.jpg')], 'cannot be read', True
    ),
    'no folders': (folders(), 'has no folders', True),
    'no folder': (data(type='ImageNet', data_prefix='', split='val'), 'is not a folder', True),
    'a small head': (model(head=dict(num_classes=2)), '3 folders, and the head 2 classes', True),
    'fewer classes': (classes('ash', 'elm'), '3 folders, and CustomDataset 2 classes', True),
    'another order': (classes('oak', 'elm', 'ash'), "label 0 is the folder 'ash'", False),
    'one-hot labels of another length': (
        model(head=dict(num_classes=3), data_preprocessor=dict(num_classes=1000)),
        'model.data_preprocessor.num_classes is 1000, and model.head.num_classes 3',
        True,
    ),
    'a softmax over one class': (
        both(folders('ash'), model(head=FEW)), 'head has num_classes=1 and a softmax', True
    ),
    **{
        f'folders {names}': (folders(*names), 'each would be a class', fatal)
        for names, fatal in ((('train', 'val'), True), (('Images',), True), (('oak', 'val'), False))
    },
    'another suffix': (
        lambda root, cfg: [picture(0).save(root / f'ash/{n}', 'PNG') for n in ('x.webp', 'y.Png')],
        '1 × pictures that are not read',
        False,
    ),
    **{
        f'a line {line!r}': (listed(line), words, True)
        for line, words in (
            ('oak/a.jpg 3', 'outside the 3 classes'),
            ('oak/a.jpg -1', 'outside the 3 classes'),
            ('oak/b.jpg 1', 'do not exist'),
            ('oak/a.jpg', 'a list needs a file and the number'),
            ('a b', 'a list needs a file and the number'),
        )
    },
    'crops of photographs': (
        data(pipeline=[dict(type='RandomCrop', crop_size=8, padding=1)]),
        "RandomCrop cuts 8 pixels .*'ResizeEdge'",
        True,
    ),
}  # fmt: skip
EVERY = dict(boxes=OF_BOXES, labels=OF_LABELS, folders=OF_FOLDERS)
# Errors that need a look into every mask or file; two are warnings before a training.
THOROUGH = {name for name in OF_BOXES if name.startswith('RLE')} | {
    *(name for name in OF_LABELS if '255' in name),
    'empty folders',
    'a picture of text',
}
# What is right, though it may look wrong.
RIGHT: dict[str, dict[str, Make]] = dict(
    boxes={
        'nothing': content(lambda c: None),
        # Numbers that mmdet loads.
        'areas of NaN': one(area=float('nan')),
        'sides as floats': content(lambda c: [i.update(height=48.0) for i in c['images']]),
        'boxes alone': both(BOXES_ALONE, NO_MASKS),
        'as many queries as objects': model(num_queries=2),
    },
    labels={
        'nothing': lambda root, cfg: None,
        'a list of names': both(
            lambda root, cfg: (root / 'a.txt').write_text('0\n2\n'), data(ann_file='a.txt')
        ),
        'single bits': lambda root, cfg: Image.new('1', SIZE[::-1]).save(root / 'ann/2.png'),
        'a void of 250': both(
            maps(0, 1, 2, 250), model(decode_head=dict(num_classes=3, ignore_index=250))
        ),
        '0, 1 and 255': both(maps(0, 1, 255), classes('sky', 'road')),
        'one class': ONE_CLASS,
        **{
            f'one class, {loss}': both(
                ONE_CLASS, model(decode_head=dict(FEW, loss_decode=loss))
            )
            for loss in (
                dict(type='mmseg.CrossEntropyLoss', use_sigmoid=True),
                [dict(type='CrossEntropyLoss'), dict(type='DiceLoss')],
            )
        },
    },
    folders={
        'nothing': lambda root, cfg: None,
        'names for people': classes('Fraxinus', 'Ulmus', 'Quercus'),
        'a line': listed('oak/a.jpg 2'),
        'crops of what was resized': data(
            pipeline=[dict(type='ResizeEdge', scale=8), dict(type='RandomCrop', crop_size=8)]
        ),
    },
)  # fmt: skip
