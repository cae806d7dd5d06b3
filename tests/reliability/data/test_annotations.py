"""Annotations with every kind of fault: each is found and named, and mmdet is predicted rightly."""

import copy
import json
import logging
import os
import re
from pathlib import Path

import pytest
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import DATASETS

from mmvttt.errors import DataError
from mmvttt.openmmlab.reliability import SeededDataset
from mmvttt.openmmlab.reliability.data import coco as coco_check
from mmvttt.openmmlab.reliability.data.annotations import check_annotations, check_data
from mmvttt.openmmlab.reliability.data.findings import Findings

from ...bad_input.cases import refused, run_cases
from .faults import EVERY, QUICK
from .sets import CLASSES, annotation, coco, coco_dataset, config, make_coco, write

pytest.importorskip('mmdet')
ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get('MMVTTT_DATA', ROOT.parent / 'shared/data'))


@pytest.fixture
def root(boxes: Path) -> Path:
    """The folder of a set without a fault."""
    write(boxes, coco())
    return boxes


def findings(root: Path, content: object, images: bool = False, **changes: object) -> Findings:
    write(root, content)
    (report,) = check_annotations(config(coco_dataset(root, **changes)), ('train',), images=images)
    return report


def load(root: Path, **changes: object) -> object:
    """mmdet's data set, fully loaded."""
    return DATASETS.build(
        dict(coco_dataset(root, **changes), pipeline=[], serialize_data=False, _scope_='mmdet')
    )


def test_nothing_wrong(root: Path) -> None:
    report = findings(root, coco(), images=True)
    assert not report.errors + report.warnings
    assert report.classes == CLASSES
    account = ['  cat: 4 listed, 4 learned', '  dog: 4 listed, 4 learned', '  nothing wrong']
    assert str(report).splitlines()[1:] == account
    check_data(config(coco_dataset(root)))


@pytest.mark.parametrize('name', EVERY)
def test_every_fault_is_named(root: Path, name: str) -> None:
    """By check_data, and before a training."""
    apply, sentence, fatal = EVERY[name]
    content = coco()
    apply(content)
    report = findings(root, content)
    assert [s for s in (report.errors if fatal else report.warnings) if re.search(sentence, s)]
    assert bool(report.errors) == fatal, str(report)
    (quick,) = check_annotations(config(coco_dataset(root)), thorough=False)
    assert bool(quick.errors) == (fatal and name in QUICK)
    if 'not listed' in sentence:
        assert any(re.search(sentence, warning) for warning in quick.warnings)


def test_files_that_cannot_be_read_are_named_if_they_are_read(root: Path) -> None:
    """A fault of a transform, with nothing wrong in the data, is told as it is."""
    load, annotations, *_ = coco_dataset(root)['pipeline']
    files = dict(data_prefix=dict(img='images/', seg='none'))

    def fails_with(error: type[Exception], message: str, **changes: object) -> None:
        data = SeededDataset(dict(coco_dataset(root, **changes), _scope_='mmdet'))
        with pytest.raises(error, match=message):
            data[0]

    fails_with(KeyError, 'typo', pipeline=[load, lambda item: item['typo']], **files)
    seen = [load, dict(annotations, with_seg=True)]
    message = "none/0.png' is among the label maps that do not exist"
    fails_with(DataError, message, pipeline=seen, **files)


numbers = st.floats(-90, 150, width=16)
boxes = st.tuples(numbers, numbers, numbers, numbers).map(list)


def test_what_mmdet_drops_is_what_is_counted(root: Path) -> None:
    """mmdet's data set keeps as many generated boxes, ids and areas as are valid here."""

    def check(values: list) -> None:
        content = coco(2)
        content['annotations'] = [
            {**annotation(i, image, box, category), 'area': area}
            for i, (image, box, category, area) in enumerate(values)
        ]
        report = findings(root, content)
        left = sum(len(d['instances']) for d in load(root).load_data_list())
        counted = [
            int(s.split()[0])
            for s in report.errors + report.warnings
            if 'not learned' in s or 'not listed' in s
        ]
        assert left == len(values) - sum(counted), str(report)
        assert any('no box to learn' in s for s in report.errors) == (left == 0)

    annotations = st.tuples(
        st.integers(0, 1), boxes, st.sampled_from([1, 2, 2, 3]), st.sampled_from([-1, 0, 5, 400])
    )
    run_cases(st.lists(annotations, min_size=1, max_size=12), check, 40)


names = st.lists(
    st.sampled_from(['cat', 'dog', 'cow', 'car', 'Cat']), min_size=1, max_size=4, unique=True
)


def test_categories_and_classes(root: Path) -> None:
    """Label i of mmdet is the one reported; where nothing matches, training is refused."""

    def check(value: tuple[list[str], list[str]]) -> None:
        categories, classes = value
        content = coco()
        content['categories'] = [dict(id=1 + i, name=n) for i, n in enumerate(categories)]
        content['annotations'] = [a for a in content['annotations'] if a['category_id'] == 1]
        changes = dict(metainfo=dict(classes=tuple(classes)))
        report = findings(root, content, **changes)
        labels = tuple(categories[i - 1] for i in load(root, **changes).cat_ids)
        cfg = config(coco_dataset(root, **changes))
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


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        *((other, 'a.json has no list') for other in (None, 3, [], {}, {'images': []})),
        *((text, 'a.json is not JSON') for text in (b'', b'{"images": [', b'\xff', b'[' * 10**5)),
    ],
)
def test_no_json(root: Path, content: object, message: str) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (root / 'a.json').write_bytes(data)
    refused(lambda: check_data(config(coco_dataset(root))), message, kind=DataError)


def test_no_file(root: Path) -> None:
    for name in ('', 'images'):
        cfg = config(coco_dataset(root, ann_file=name))
        refused(lambda cfg=cfg: check_data(cfg), 'is not a file', kind=DataError)


def test_large_files_are_not_parsed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / 'a.json').write_text('{')
    monkeypatch.setattr(coco_check, 'LARGEST', 0)
    check_data(config(coco_dataset(root)))


def test_labels_must_mean_the_same_in_training_and_validation(root: Path, tmp_path: Path) -> None:
    make_coco(tmp_path / 'val')
    cfg = config(coco_dataset(root))
    cfg.val_dataloader = dict(dataset=copy.deepcopy(coco_dataset(tmp_path / 'val')))
    check_data(cfg)
    for order in ('dog', 'cat'), ('cat',):
        categories = [dict(id=1 + CLASSES.index(n), name=n) for n in order]
        write(tmp_path / 'val', coco() | dict(categories=categories))
        refused(lambda: check_data(cfg), 'label', 'val_dataloader', kind=DataError)


def test_a_class_without_its_comma(root: Path) -> None:
    cfg = config(coco_dataset(root, metainfo=dict(classes='cat')))
    refused(lambda: check_data(cfg), "the string 'cat'", "classes=('cat',)")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Logged warnings."""
    texts: list[str] = []

    def keep(self: MMLogger, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            texts.append(record.msg)

    monkeypatch.setattr(MMLogger, 'callHandlers', keep)
    return texts


def test_evaluators_with_other_annotations(root: Path, warnings: list[str]) -> None:
    """An AP of 0 otherwise."""
    own, other = root / 'a.json', root / 'other.json'
    other.write_text('{}')
    evaluator = dict(type='CocoMetric', ann_file=str(other))
    cfg = config(coco_dataset(root), split='val', val_evaluator=[evaluator])
    check_data(cfg, ('val',))
    (text,) = warnings
    assert text.startswith(f"val_evaluator.0.ann_file is '{other}', and val_dataloader.dataset")
    assert text.endswith(f'set val_evaluator.0.ann_file={own}')
    (root / 'link.json').symlink_to(own)
    for same in own, root / 'link.json', root / '..' / root.name / 'a.json':
        cfg.val_evaluator[0].ann_file = str(same)
        check_data(cfg, ('val',))
    # Several sets may be merged in one file; a set of panoptics has boxes in another one.
    cfg.val_evaluator[0].ann_file = str(other)
    several = dict(type='ConcatDataset', datasets=[coco_dataset(root), coco_dataset(root)])
    for dataset in several, coco_dataset(root, type='CocoPanopticDataset'):
        cfg.val_dataloader.dataset = dataset
        check_data(cfg, ('val',))
    assert len(warnings) == 1


def test_what_is_dropped_is_logged_by_one_rank(
    root: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    cfg = config(coco_dataset(root, metainfo=dict(classes=('cat',))))
    for rank in '01':
        monkeypatch.setenv('RANK', rank)
        check_data(cfg)
    (text,) = warnings
    assert text.startswith('train_dataloader.dataset: categories that are dropped, because')
    assert text.endswith(": 'dog'")


def test_each_set_is_checked_once(root: Path) -> None:
    cfg = config(coco_dataset(root))
    cfg.val_dataloader = dict(dataset=coco_dataset(root, test_mode=True))
    cfg.test_dataloader = cfg.val_dataloader
    keys = [findings.key for findings in check_annotations(cfg, thorough=False)]
    assert keys == ['train_dataloader.dataset', 'val_dataloader.dataset']


def test_images_without_a_box_may_be_part_of_a_training(root: Path) -> None:
    """Alone they cannot be; a test set may even come without annotations."""
    write(root, coco() | dict(annotations=[]))
    dataset = coco_dataset(root)
    refused(lambda: check_data(config(dataset)), 'no box to learn', kind=DataError)
    check_data(config(dict(type='ConcatDataset', datasets=[dataset, dict(dataset, indices=1)])))
    write(root, {k: v for k, v in coco().items() if k != 'annotations'})
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


def test_a_class_with_its_own_pipeline(root: Path) -> None:
    dataset = coco_dataset(root, type=FixedPipeline)
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
def test_other_formats_and_places_are_left_alone(root: Path, changes: dict) -> None:
    write(root, {})
    dataset = config({**coco_dataset(root), **changes})
    assert not list(check_annotations(dataset, thorough=False))


@pytest.mark.parametrize('loader', ['mmdet.LoadImageFromFile', 'LoadImageFromNDArray'])
def test_images_from_elsewhere_are_not_looked_for(root: Path, loader: str) -> None:
    cfg = config(coco_dataset(root, data_prefix=dict(img=''), pipeline=[dict(type=loader)]))
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
    if not (DATA / folder).is_dir():
        pytest.skip(f'{folder} is not under {DATA}: set MMVTTT_DATA')
    monkeypatch.setenv('MMVTTT_DATA', str(DATA))
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    check_data(cfg)
    train, val = check_annotations(cfg, ('train',), images=False), check_annotations(cfg, ('val',))
    for report, count in zip([*train, *val], images, strict=True):
        assert not report.errors + report.warnings, str(report)
        assert report.summary.startswith(f'{count} images')
