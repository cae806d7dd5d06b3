"""Annotations with every kind of fault: each is found and named, and mmdet is predicted rightly."""

import copy
import json
import re
from collections.abc import Callable
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
from mmvttt.reliability.data.rle import run_lengths

from ...bad_input.cases import refused, run_cases
from .faults import EVERY, FAULTS, SILENT
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


def test_faults_of_single_annotations(root: Path) -> None:
    def check(value: tuple[str, int]) -> None:
        name, number = value
        change, kind, fatal = FAULTS[name]
        content = coco()
        change(content['annotations'][number])
        found = findings(root, content)
        sentences = found.errors if fatal else found.warnings
        assert [s for s in sentences if kind in s and s.startswith('1 × ')], str(found)
        assert len(found.errors) == fatal, str(found)

    for name in FAULTS:
        run_cases(st.tuples(st.just(name), st.integers(0, 7)), check, 2)


def test_several_faults_are_counted_by_kind(root: Path) -> None:
    def check(chosen: list[str]) -> None:
        content = coco()
        for ann, name in zip(content['annotations'], chosen, strict=False):
            FAULTS[name][0](ann)
        found = findings(root, content)
        counted = '\n'.join(found.errors + found.warnings)
        for kind in {FAULTS[name][1] for name in chosen}:
            assert kind in counted

    # 'without id' is no reason not to look further; all others are told one by one.
    names = st.sampled_from(sorted(set(FAULTS) - {'no id'}))
    run_cases(st.lists(names, min_size=2, max_size=8), check, 15)


def test_the_list_of_faults() -> None:
    """No fault has been dropped from the table: it began with 71."""
    assert len(EVERY) >= 71


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


def wrong(item: dict) -> dict:
    return item['typo']


def fails_with(error: type[Exception], message: str, dataset: dict) -> None:
    data = SeededDataset(dict(dataset, _scope_='mmdet'))
    with pytest.raises(error, match=message):
        data[0]


def test_a_fault_of_one_s_own_transform_is_not_blamed_on_the_data(root: Path) -> None:
    """Though there is one that mmdet leaves out; a toolbox's transform beside it still is."""
    from mmdet.datasets.transforms import Resize

    class Own(Resize):
        def transform(self, item: dict) -> dict:
            return super().transform(wrong(item))

    content = coco()
    content['annotations'][1]['category_id'] = 77
    write(root, content)
    load, *_ = pipeline = coco_dataset(root)['pipeline']
    size = dict(scale=(32, 32))
    for transform in (
        wrong,
        dict(type=Own, **size),
        dict(type='RandomApply', prob=1, transforms=[dict(type=Own, **size)]),
    ):
        dataset = coco_dataset(root, pipeline=[load, transform])
        fails_with(KeyError, 'typo', dataset)
        # Nor on files that nothing reads, or that a backend finds.
        fails_with(KeyError, 'typo', {**dataset, 'data_prefix': dict(img='images/', seg='none')})
    mapped = [wrong, dict(load, backend_args=dict(backend='petrel'))]
    fails_with(KeyError, 'typo', coco_dataset(root, pipeline=mapped, data_prefix=dict(img='none')))
    dataset = coco_dataset(root, pipeline=[load, dict.copy, dict(type='Resize', scale='32')])
    fails_with(DataError, 'not listed', dataset)
    seen = dict(pipeline[1], with_seg=True)
    dataset = coco_dataset(root, pipeline=[load, seen], data_prefix=dict(img='images/', seg='none'))
    fails_with(DataError, "none/0.png' is among the label maps that are not there", dataset)


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


def test_a_class_without_its_comma(root: Path) -> None:
    write(root, coco())

    def check(name: str) -> None:
        cfg = config(coco_dataset(root, metainfo=dict(classes=name)))
        refused(lambda: check_data(cfg), f'the string {name!r}', f'classes=({name!r},)')

    run_cases(st.sampled_from(['cat', 'dog', 'cat dog', '']), check, 4)


no_content = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(['images', 'annotations', 'categories', 'data_list']), inner, max_size=4
        )
    ),
)


def test_no_coco_at_all(root: Path) -> None:
    cfg = config(coco_dataset(root))

    def check(content: object) -> None:
        write(root, content)
        refused(lambda: check_data(cfg), 'a.json', kind=DataError)

    run_cases(no_content, check, 30)


def test_no_json(root: Path) -> None:
    cfg = config(coco_dataset(root))
    whole = json.dumps(coco()).encode()

    def check(content: bytes) -> None:
        (root / 'a.json').write_bytes(content)
        refused(lambda: check_data(cfg), 'a.json is no JSON', kind=DataError)

    cut = st.integers(0, len(whole) - 1).map(lambda n: whole[:n])
    junk = st.binary(max_size=40).filter(lambda b: not b.strip().isdigit())
    deep = st.just(b'[' * 100_000)
    run_cases(cut | junk | deep, check, 25)


@pytest.mark.parametrize('first', [True, False])
def test_large_files_are_not_parsed(
    root: Path, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their categories are read, which stand at the start or, as in COCO's, at the end."""
    monkeypatch.setattr(coco_check, 'LARGEST', 100)
    monkeypatch.setattr(coco_check, '_PIECE', 200)
    monkeypatch.setattr(coco_check.json, 'load', None)
    content = coco()
    categories = dict(categories=content.pop('categories'))
    content = {**categories, **content} if first else {**content, **categories}
    write(root, content)
    check_data(config(coco_dataset(root)))
    other = config(coco_dataset(root, metainfo=dict(classes=('cow',))))
    refused(lambda: check_data(other), "categories 'cat', 'dog'", kind=DataError)
    text = (root / 'a.json').read_text()
    (root / 'a.json').write_text(text[:-5])
    refused(lambda: check_data(other), 'ends in the middle', kind=DataError)


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


def test_heads_with_fewer_classes(root: Path) -> None:
    write(root, coco())
    heads: dict[str, Callable[[int], dict]] = {
        'roi_head.bbox_head': lambda n: dict(roi_head=dict(bbox_head=dict(num_classes=n))),
        'bbox_head': lambda n: dict(bbox_head=dict(num_classes=n)),
    }

    def check(value: tuple[str, int]) -> None:
        name, count = value
        cfg = config(coco_dataset(root), model=heads[name](count))
        if count >= len(CLASSES):
            check_data(cfg)
        else:
            refused(lambda: check_data(cfg), f'model.{name}', 'num_classes=2', kind=DataError)

    run_cases(st.tuples(st.sampled_from(sorted(heads)), st.integers(0, 4)), check, 8)


def test_run_lengths_are_those_of_pycocotools() -> None:
    masks = pytest.importorskip('pycocotools.mask')
    np = pytest.importorskip('numpy')

    def check(value: tuple[int, int, int]) -> None:
        height, width, seed = value
        rng = np.random.default_rng(seed)
        pixels = rng.random((height, width)) < rng.random()
        # Long runs too, of which the numbers need several digits.
        pixels = pixels.repeat(rng.integers(1, 30), 0)
        flat = pixels.ravel(order='F')
        edges = np.flatnonzero(np.diff(flat)) + 1
        runs = np.diff([0, *edges, flat.size]).tolist()
        encoded = masks.encode(np.asfortranarray(pixels.astype(np.uint8)))
        assert run_lengths(encoded['counts']) == ([0, *runs] if flat[0] else runs)

    side = st.integers(1, 20)
    run_cases(st.tuples(side, side, st.integers(0, 999)), check, 25)
