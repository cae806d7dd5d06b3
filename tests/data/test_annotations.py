"""What is said of whole sets: mmdet is predicted rightly, sets are compared, others left alone."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.registry import DATASETS
from pycocotools.mask import encode

from mmvttt.errors import DataError
from mmvttt.openmmlab.data import coco as coco_check
from mmvttt.openmmlab.data.findings import Findings
from mmvttt.openmmlab.reliability import SeededDataset

from ..bad_input.cases import refused, run_cases
from ..public_data import public_data
from .sets import (
    SIZE,
    annotation,
    check_annotations,
    check_data,
    coco,
    coco_dataset,
    config,
    folder_dataset,
    label_dataset,
    write,
)

pytest.importorskip('mmdet')
ROOT = Path(__file__).resolve().parents[2]


def findings(boxes: Path, content: object, images: bool = False, **changes: object) -> Findings:
    write(boxes, content)
    (report,) = check_annotations(config(coco_dataset(boxes, **changes)), ('train',), images=images)
    return report


def load(boxes: Path, **changes: object) -> object:
    """mmdet's data set, fully loaded."""
    return DATASETS.build(
        dict(coco_dataset(boxes, **changes), pipeline=[], serialize_data=False, _scope_='mmdet')
    )


def test_files_that_cannot_be_read_are_named_if_they_are_read(boxes: Path) -> None:
    """A fault of a transform, with nothing wrong in the data, is told as it is."""
    load, annotations, *_ = coco_dataset(boxes)['pipeline']
    files = dict(data_prefix=dict(img='images/', seg='none'))

    def fails_with(error: type[Exception], message: str, **changes: object) -> None:
        data = SeededDataset(dict(coco_dataset(boxes, **changes), _scope_='mmdet'))
        with pytest.raises(error, match=message):
            data[0]

    fails_with(KeyError, 'typo', pipeline=[load, lambda item: item['typo']], **files)
    seen = [load, dict(annotations, with_seg=True)]
    message = "none/0.png' is among the label maps that do not exist"
    fails_with(DataError, message, pipeline=seen, **files)


numbers = st.floats(-90, 150, width=16)
corners = st.tuples(numbers, numbers, numbers, numbers).map(list)


def test_what_mmdet_drops_is_what_is_counted(boxes: Path) -> None:
    """mmdet's data set keeps as many generated boxes, ids and areas as are valid here."""

    def check(values: list) -> None:
        content = coco(2)
        content['annotations'] = [
            {**annotation(i, image, box, category), 'area': area}
            for i, (image, box, category, area) in enumerate(values)
        ]
        report = findings(boxes, content)
        left = sum(len(d['instances']) for d in load(boxes).load_data_list())
        # As in 'cat: 3 listed, 1 learned (2 without area: annotation 5)'.
        counts = [list(map(int, re.findall(r'(\d+) [a-z]', line))) for line in report.account]
        assert all(listed == learned + sum(others) for listed, learned, *others in counts)
        assert sum(learned for _, learned, *_ in counts) == left
        assert bool(report.errors) == (left == 0), str(report)

    annotations = st.tuples(
        st.integers(0, 1), corners, st.sampled_from([1, 2, 2, 3]), st.sampled_from([-1, 0, 5, 400])
    )
    run_cases(st.lists(annotations, min_size=1, max_size=12), check, 40)


names = st.lists(
    st.sampled_from(['cat', 'dog', 'cow', 'car', 'Cat']), min_size=1, max_size=4, unique=True
)


def test_categories_and_classes(boxes: Path) -> None:
    """Label i of mmdet is the one reported; where nothing matches, training is refused."""

    def check(value: tuple[list[str], list[str]]) -> None:
        categories, classes = value
        content = coco()
        content['categories'] = [dict(id=1 + i, name=n) for i, n in enumerate(categories)]
        content['annotations'] = [a for a in content['annotations'] if a['category_id'] == 1]
        changes = dict(metainfo=dict(classes=tuple(classes)))
        report = findings(boxes, content, **changes)
        labels = tuple(categories[i - 1] for i in load(boxes, **changes).cat_ids)
        cfg = config(coco_dataset(boxes, **changes))
        if not labels:
            refused(lambda: check_data(cfg), 'no class of metainfo', repr(categories[0]))
            assert report.classes is None
            return
        assert report.classes == labels
        # mmdet counts labels by the file, and names them by metainfo.
        named = tuple(classes[: len(labels)]) == labels and len(classes) == len(labels)
        assert named != any('order of categories' in w for w in report.warnings)
        if categories[0] in classes:
            check_data(cfg)
        else:
            refused(lambda: check_data(cfg), 'no box to learn', kind=DataError)

    run_cases(st.tuples(names, names), check, 30)


def test_large_files_are_not_parsed(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (boxes / 'a.json').write_text('{')
    monkeypatch.setattr(coco_check, 'LARGEST', 0)
    check_data(config(coco_dataset(boxes)))


def test_evaluators_with_other_annotations(boxes: Path, logged: list[str]) -> None:
    """An AP of 0 otherwise."""
    own, other = boxes / 'a.json', boxes / 'other.json'
    other.write_text('{}')
    evaluator = dict(type='CocoMetric', ann_file=str(other))
    cfg = config(coco_dataset(boxes), split='val', val_evaluator=[evaluator])
    check_data(cfg, ('val',))
    (text,) = logged
    assert f": val_evaluator.0.ann_file is '{other}', and val_dataloader.dataset reads" in text
    assert text.endswith(f'set val_evaluator.0.ann_file={own}')
    (boxes / 'link.json').symlink_to(own)
    for same in own, boxes / 'link.json', boxes / '..' / boxes.name / 'a.json':
        cfg.val_evaluator[0].ann_file = str(same)
        check_data(cfg, ('val',))
    # Several sets may be merged in one file; a set of panoptics has boxes in another one.
    cfg.val_evaluator[0].ann_file = str(other)
    several = dict(type='ConcatDataset', datasets=[coco_dataset(boxes), coco_dataset(boxes)])
    for dataset in several, coco_dataset(boxes, type='CocoPanopticDataset'):
        cfg.val_dataloader.dataset = dataset
        check_data(cfg, ('val',))
    assert len(logged) == 1


def test_what_is_dropped_is_logged_by_one_rank(
    boxes: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    cfg = config(coco_dataset(boxes, metainfo=dict(classes=('cat',))))
    for rank in '01':
        monkeypatch.setenv('RANK', rank)
        check_data(cfg)
    (text,) = logged
    assert text.startswith('train_dataloader.dataset: categories that are dropped, because')
    assert text.endswith(': dog')


def test_each_set_is_checked_once(boxes: Path) -> None:
    cfg = config(coco_dataset(boxes))
    cfg.val_dataloader = dict(dataset=coco_dataset(boxes, test_mode=True))
    cfg.test_dataloader = cfg.val_dataloader
    keys = [findings.key for findings in check_annotations(cfg, thorough=False)]
    assert keys == ['train_dataloader.dataset', 'val_dataloader.dataset']


def test_images_without_a_box_may_be_part_of_a_training(boxes: Path) -> None:
    """Alone they cannot be; a test set may even come without annotations."""
    write(boxes, coco() | dict(annotations=[]))
    dataset = coco_dataset(boxes)
    refused(lambda: check_data(config(dataset)), 'no box to learn', kind=DataError)
    check_data(config(dict(type='ConcatDataset', datasets=[dataset, dict(dataset, indices=1)])))
    write(boxes, {k: v for k, v in coco().items() if k != 'annotations'})
    check_data(config(dataset, split='test'), ('test',))
    refused(lambda: check_data(config(dataset)), 'no list annotations:')


class FixedOptions(pytest.importorskip('mmdet.datasets').CocoDataset):
    """A user's class that cannot be built without being loaded."""

    def __init__(self, ann_file: str) -> None:
        super().__init__(ann_file=ann_file)


class FixedPipeline(pytest.importorskip('mmdet.datasets').CocoDataset):
    """A user's class with a pipeline of its own."""

    def __init__(self, **options: object) -> None:
        super().__init__(pipeline=[], **options)


def test_a_class_with_its_own_pipeline(boxes: Path) -> None:
    dataset = coco_dataset(boxes, type=FixedPipeline)
    del dataset['pipeline']
    check_data(config(dataset))


@pytest.mark.parametrize(
    'changes',
    [
        dict(type='CocoPanopticDataset'),
        dict(type=FixedOptions),
        dict(type='NoSuchDataset'),
        dict(data_root='s3://bucket/'),
        dict(data_prefix=dict(img='s3://bucket/')),
        dict(backend_args=dict(backend='petrel')),
    ],
)
def test_other_formats_and_places_are_left_alone(boxes: Path, changes: dict) -> None:
    write(boxes, {})
    dataset = config({**coco_dataset(boxes), **changes})
    assert not list(check_annotations(dataset, thorough=False))


@pytest.mark.parametrize('loader', ['mmdet.LoadImageFromFile', 'LoadImageFromNDArray'])
def test_images_from_elsewhere_are_not_looked_for(boxes: Path, loader: str) -> None:
    cfg = config(coco_dataset(boxes, data_prefix=dict(img=''), pipeline=[dict(type=loader)]))
    (report,) = check_annotations(cfg, thorough=False)
    assert bool(report.errors) == (loader == 'mmdet.LoadImageFromFile')


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
    monkeypatch.setenv('MMVTTT_DATA', str(public_data(folder).parent))
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    check_data(cfg)
    train, val = check_annotations(cfg, ('train',), images=False), check_annotations(cfg, ('val',))
    for report, count in zip([*train, *val], images, strict=True):
        assert not report.errors + report.warnings, str(report)
        assert report.summary.startswith(f'{count} images')


@pytest.mark.parametrize(
    ('box', 'around'),
    [
        # A box may be larger than the mask 16 × 20 of what is visible, and cut off a little of it.
        ([0, 0, 30, 30], True),
        ([0, 0, 40, 40], False),
        ([4, 10, 16, 16], True),
        ([4, 11, 16, 15], False),
        # Corners.
        ([4, 6, 20, 26], False),
    ],
)
def test_boxes_around_their_masks(box: list, around: bool) -> None:
    pixels = np.zeros(SIZE, np.uint8, order='F')
    pixels[6:26, 4:20] = 1
    rle = dict(size=list(SIZE), counts=encode(pixels)['counts'].decode())
    for mask in ([[4, 6, 20, 6, 20, 26, 4, 26]], rle):
        ann = dict(bbox=box, segmentation=mask)
        assert coco_check._is_around(ann, SIZE, True) is around


def test_pictures_that_are_learned_and_measured(
    boxes: Path, labels: Path, folders: Path, tmp_path: Path
) -> None:
    for dataset, scope, words in (
        (coco_dataset(boxes), 'mmdet', '4 of 4 pictures are also in train_dataloader.dataset'),
        (label_dataset(labels), 'mmseg', '3 of 3 pictures are also in train_dataloader.dataset'),
        (folder_dataset(folders), 'mmpretrain', 'is also read by train_dataloader'),
    ):
        cfg = config(dataset, scope)
        # As the same set without augmentation.
        cfg.val_dataloader = dict(dataset=dict(dataset, test_mode=True))
        _, report = check_annotations(cfg, ('train', 'val'), thorough=False)
        assert [w for w in report.warnings if words in w], report
        cfg.train_dataloader, cfg.test_dataloader = None, cfg.val_dataloader
        assert not [w for f in check_annotations(cfg, thorough=False) for w in f.warnings]
    (tmp_path / 'link').symlink_to(boxes)
    shutil.copytree(boxes, tmp_path / 'copy')
    (tmp_path / 'copy/images/3.jpg').write_bytes((boxes / 'images/0.jpg').read_bytes())
    cfg = config(coco_dataset(boxes))
    for place, count in (('copy', 3), ('link', 4)):
        cfg.val_dataloader = dict(dataset=coco_dataset(tmp_path / place))
        _, report = check_annotations(cfg, ('train', 'val'), thorough=False)
        assert f'{count} of 4 pictures' in report.warnings[0]
    cfg.train_dataloader.dataset.indices, cfg.val_dataloader.dataset.indices = [0, 1], [2, 3]
    _, report = check_annotations(cfg, ('train', 'val'), thorough=False)
    assert not report.warnings
