"""Annotations with every kind of fault: each is found and named, and mmdet is predicted rightly."""

import copy
import json
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from mmengine.registry import DATASETS

from mmvttt.errors import DataError
from mmvttt.reliability import SeededDataset
from mmvttt.reliability.data import coco as coco_check
from mmvttt.reliability.data.annotations import check_annotations
from mmvttt.reliability.data.findings import Findings
from mmvttt.reliability.data.paths import check_data

from ...bad_input.cases import refused, run_cases
from .faults import EVERY, SILENT
from .sets import CLASSES, annotation, coco, coco_dataset, config, make_coco, write

pytest.importorskip('mmdet')


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp('coco')
    make_coco(root / 'set')
    return root / 'set'


def findings(root: Path, content: object, images: bool = False, **changes: object) -> Findings:
    write(root, content)
    (found,) = check_annotations(config(coco_dataset(root, **changes)), ('train',), images=images)
    return found


def load(root: Path, **changes: object) -> object:
    """mmdet's data set, fully loaded."""
    return DATASETS.build(
        dict(coco_dataset(root, **changes), pipeline=[], serialize_data=False, _scope_='mmdet')
    )


def test_nothing_wrong(root: Path) -> None:
    found = findings(root, coco(), images=True)
    assert not found.errors + found.warnings
    assert found.classes == CLASSES
    assert str(found).endswith('categories in ' + f'{root}/a.json\n  nothing wrong')
    write(root, coco())
    check_data(config(coco_dataset(root)))


@pytest.mark.parametrize('name', EVERY)
def test_every_fault_is_named(root: Path, name: str) -> None:
    """By check_data; and by a training which it stops, however mmdet does."""
    apply, sentence, fatal = EVERY[name]
    content = coco()
    apply(content)
    found = findings(root, content)
    assert [s for s in (found.errors if fatal else found.warnings) if re.search(sentence, s)]
    assert bool(found.errors) == fatal, str(found)

    def train() -> None:
        check_data(config(coco_dataset(root)))
        data = SeededDataset(dict(coco_dataset(root), _scope_='mmdet'))
        for number in range(len(data)):
            data[number]

    if fatal and name not in SILENT:
        with pytest.raises(DataError, match=sentence):
            train()
    else:
        train()


def test_files_that_cannot_be_read_are_named_if_they_are_read(root: Path) -> None:
    """A fault of a transform, with nothing wrong in the data, is told as it is."""
    write(root, coco())
    load, annotations, *_ = coco_dataset(root)['pipeline']
    files = dict(data_prefix=dict(img='images/', seg='none'))

    def fails_with(error: type[Exception], message: str, **changes: object) -> None:
        data = SeededDataset(dict(coco_dataset(root, **changes), _scope_='mmdet'))
        with pytest.raises(error, match=message):
            data[0]

    wrong = [load, lambda item: item['typo']]
    fails_with(KeyError, 'typo', pipeline=wrong, **files)
    remote = [lambda item: item['typo'], dict(load, backend_args=dict(backend='petrel'))]
    fails_with(KeyError, 'typo', pipeline=remote, data_prefix=dict(img='none'))
    seen = [load, dict(annotations, with_seg=True)]
    message = "none/0.png' is among the label maps that are not there"
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
        found = findings(root, content)
        left = sum(len(d['instances']) for d in load(root).load_data_list())
        counted = [
            int(s.split()[0])
            for s in found.errors + found.warnings
            if 'dropped' in s or 'not listed' in s
        ]
        assert left == len(values) - sum(counted), str(found)
        assert any(coco_check._usable(content, CLASSES)) == (left > 0)

    annotations = st.tuples(
        st.integers(0, 1), boxes, st.sampled_from([1, 2, 2, 3]), st.sampled_from([-1, 0, 5, 400])
    )
    run_cases(st.lists(annotations, min_size=1, max_size=12), check, 40)


names = st.sampled_from(['cat', 'dog', 'cow', 'car', 'Cat'])
name_lists = st.lists(names, min_size=1, max_size=4, unique=True)


def test_categories_and_classes(root: Path) -> None:
    """Label i of mmdet is the one reported; where nothing matches, training is refused."""

    def check(value: tuple[list[str], list[str]]) -> None:
        categories, classes = value
        content = coco()
        content['categories'] = [dict(id=1 + i, name=n) for i, n in enumerate(categories)]
        content['annotations'] = [a for a in content['annotations'] if a['category_id'] == 1]
        changes = dict(metainfo=dict(classes=tuple(classes)))
        found = findings(root, content, **changes)
        dataset = load(root, **changes)
        labels = tuple(categories[i - 1] for i in dataset.cat_ids)
        cfg = config(coco_dataset(root, **changes))
        if not labels:
            refused(lambda: check_data(cfg), 'no class of metainfo', repr(categories[0]))
            assert found.classes is None
            return
        assert found.classes == labels
        # mmdet counts labels by the file, and names them by metainfo.
        named = tuple(classes[: len(labels)]) == labels and len(classes) == len(labels)
        assert named != any('order of the categories' in w for w in found.warnings)
        if categories[0] in classes:
            check_data(cfg)
        else:
            refused(lambda: check_data(cfg), 'no box to learn', kind=DataError)

    run_cases(st.tuples(name_lists, name_lists), check, 30)


def test_coco_s_own_classes_where_the_config_gives_none(root: Path) -> None:
    write(root, coco())
    cfg = config(coco_dataset(root, metainfo=None))
    check_data(cfg)
    (found,) = check_annotations(cfg, images=False)
    assert found.classes == CLASSES
    assert any(
        'classes of metainfo that are no category' in w and '(78)' in w for w in found.warnings
    )
    content = coco()
    content['categories'] = [dict(id=1, name='screw'), dict(id=2, name='nut')]
    write(root, content)
    refused(lambda: check_data(cfg), "'person'", "classes=('screw', 'nut')", kind=DataError)


def test_no_json(root: Path) -> None:
    cfg = config(coco_dataset(root))
    whole = json.dumps(coco()).encode()

    def check(content: bytes) -> None:
        (root / 'a.json').write_bytes(content)
        refused(lambda: check_data(cfg), 'a.json is no JSON', kind=DataError)

    for other in (None, 3, [], {}, {'images': []}, {'data_list': [], 'annotations': {}}):
        write(root, other)
        refused(lambda: check_data(cfg), 'a.json has no list', kind=DataError)

    cut = st.integers(0, len(whole) - 1).map(lambda n: whole[:n])
    junk = st.binary(max_size=40).filter(lambda b: not b.strip().isdigit())
    deep = st.just(b'[' * 100_000)
    run_cases(cut | junk | deep, check, 25)


def test_large_files_are_not_parsed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / 'a.json').write_text('{')
    refused(lambda: check_data(config(coco_dataset(root))), 'no JSON', kind=DataError)
    monkeypatch.setattr(coco_check, 'LARGEST', 0)
    check_data(config(coco_dataset(root)))


def test_labels_must_mean_the_same_in_training_and_validation(root: Path, tmp_path: Path) -> None:
    write(root, coco())
    make_coco(tmp_path / 'val')
    cfg = config(coco_dataset(root))

    def check(order: list[str]) -> None:
        content = coco()
        content['categories'] = [dict(id=1 + CLASSES.index(n), name=n) for n in order]
        write(tmp_path / 'val', content)
        cfg.val_dataloader = dict(dataset=copy.deepcopy(coco_dataset(tmp_path / 'val')))
        if tuple(order) == CLASSES:
            check_data(cfg)
        else:
            refused(lambda: check_data(cfg), 'label', 'val_dataloader', kind=DataError)

    orders = st.sampled_from([['cat', 'dog'], ['dog', 'cat'], ['cat'], ['dog']])
    run_cases(orders, check, 4)


@pytest.mark.parametrize('name', ['cat', 'dog', 'cat dog', ''])
def test_a_class_without_its_comma(root: Path, name: str) -> None:
    write(root, coco())
    cfg = config(coco_dataset(root, metainfo=dict(classes=name)))
    refused(lambda: check_data(cfg), f'the string {name!r}', f'classes=({name!r},)')


@pytest.mark.parametrize('name', ['roi_head.bbox_head', 'bbox_head'])
def test_heads_with_fewer_classes(root: Path, name: str) -> None:
    write(root, coco())
    for count in range(4):
        cfg = config(coco_dataset(root))
        cfg.merge_from_dict({f'model.{name}.num_classes': count})
        if count >= len(CLASSES):
            check_data(cfg)
        else:
            refused(partial(check_data, cfg), f'model.{name}', 'num_classes=2', kind=DataError)
