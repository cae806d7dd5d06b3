"""Small sets of each toolbox, whole, to be damaged: COCO's format, label maps, class folders."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from mmengine.config import Config
from PIL import Image

from mmvttt.openmmlab.data import annotations
from mmvttt.openmmlab.data.dataset_config import SPLITS, datasets_of
from mmvttt.openmmlab.data.findings import Findings

SIZE = (48, 64)
CLASSES = ('cat', 'dog')


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def polygon(box: list[float]) -> list[list[float]]:
    x, y, w, h = box
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def annotation(number: int, image: int, box: list[float], category: int) -> dict:
    return dict(
        **dict(id=number, image_id=image, category_id=category, iscrowd=0, bbox=box),
        **dict(area=box[2] * box[3], segmentation=polygon(box)),
    )


def coco(images: int = 4) -> dict:
    """Two boxes in every image, one of each category."""
    height, width = SIZE
    return dict(
        images=[
            dict(id=i, file_name=f'{i}.jpg', height=height, width=width) for i in range(images)
        ],
        annotations=[
            annotation(2 * i + k + 1, i, [4 + 20 * k, 6, 16, 20 + i], 1 + k)
            for i in range(images)
            for k in range(2)
        ],
        categories=[dict(id=1 + i, name=name) for i, name in enumerate(CLASSES)],
    )


def make_coco(root: Path, images: int = 4) -> None:
    (root / 'images').mkdir(parents=True)
    for i in range(images):
        picture(i).save(root / f'images/{i}.jpg', quality=90)
    write(root, coco(images))


def write(root: Path, content: object) -> None:
    (root / 'a.json').write_text(json.dumps(content))


def coco_dataset(root: Path, **changes: object) -> dict:
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        dict(type='PackDetInputs'),
    ]
    base = dict(
        type='CocoDataset',
        data_root=str(root),
        ann_file='a.json',
        data_prefix=dict(img='images/'),
        metainfo=dict(classes=CLASSES),
        filter_cfg=dict(filter_empty_gt=False),
        pipeline=pipeline,
    )
    return {**base, **changes}


def config(dataset: dict, scope: str = 'mmdet', split: str = 'train', **more: object) -> Config:
    loader = dict(batch_size=2, dataset=copy.deepcopy(dataset))
    return Config({'default_scope': scope, f'{split}_dataloader': loader, **more})


def check_data(cfg: Config, splits: Sequence[str] = SPLITS) -> None:
    annotations.check_data(cfg, datasets_of(cfg), splits)


def check_annotations(
    cfg: Config, splits: Sequence[str] = SPLITS, **depth: bool
) -> Iterator[Findings]:
    return annotations.check_annotations(cfg, datasets_of(cfg), splits, **depth)


def make_labels(root: Path, maps: int = 3, classes: int = 3) -> None:
    for folder in ('img', 'ann'):
        (root / folder).mkdir(parents=True)
    for i in range(maps):
        picture(i).save(root / f'img/{i}.png')
        numbers = np.random.default_rng(i).integers(0, classes, SIZE, dtype=np.uint8)
        numbers[:4] = 255
        Image.fromarray(numbers).save(root / f'ann/{i}.png')


def label_dataset(root: Path, **changes: object) -> dict:
    base = dict(
        type='BaseSegDataset',
        data_root=str(root),
        data_prefix=dict(img_path='img', seg_map_path='ann'),
        metainfo=dict(classes=('sky', 'road', 'tree')),
        img_suffix='.png',
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='PackSegInputs'),
        ],
    )
    return {**base, **changes}


def make_folders(root: Path, names: tuple[str, ...] = ('ash', 'elm', 'oak')) -> None:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        picture(number).save(root / name / 'a.jpg')


def folder_dataset(root: Path, **changes: object) -> dict:
    return {**dict(type='CustomDataset', data_prefix=str(root), pipeline=[]), **changes}


# The toolbox of each kind of set, what makes one, and its config.
KINDS = dict(
    boxes=('mmdet', make_coco, coco_dataset),
    labels=('mmseg', make_labels, label_dataset),
    folders=('mmpretrain', make_folders, folder_dataset),
)
