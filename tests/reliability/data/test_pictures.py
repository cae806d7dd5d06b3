"""Image files, label maps and class folders: damaged ones are found, odd ones are read rightly."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from mmengine.registry import DATASETS
from PIL import Image

from mmvttt.errors import DataError
from mmvttt.openmmlab.reliability import SeededDataset
from mmvttt.openmmlab.reliability.data.annotations import check_annotations, check_data
from mmvttt.openmmlab.reliability.data.findings import Findings
from mmvttt.openmmlab.reliability.data.labels import _label

from ...bad_input.cases import refused, run_cases
from .sets import (
    SIZE,
    coco,
    coco_dataset,
    config,
    folder_dataset,
    label_dataset,
    make_folders,
    picture,
    write,
)


def only(cfg: object, **options: object) -> Findings:
    (report,) = check_annotations(cfg, ('train',), **options)
    return report


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------ images

FORMATS: dict[str, Callable[[], bytes]] = {
    'JPEG': lambda: encoded(picture(0), 'JPEG', quality=90),
    'progressive JPEG': lambda: encoded(picture(0), 'JPEG', progressive=True),
    'CMYK JPEG': lambda: encoded(picture(0).convert('CMYK'), 'JPEG'),
    'grey PNG': lambda: encoded(picture(0).convert('L'), 'PNG'),
    'palette PNG': lambda: encoded(picture(0).convert('P'), 'PNG'),
    'PNG with alpha': lambda: encoded(picture(0).convert('RGBA'), 'PNG'),
    '16-bit PNG': lambda: encoded(Image.fromarray(np.full(SIZE, 40_000, np.uint16)), 'PNG'),
    'WebP': lambda: encoded(picture(0), 'WEBP'),
}


def load(root: Path, index: int = 0) -> dict:
    """An image after mmdet's pipeline."""
    return DATASETS.build(dict(coco_dataset(root), serialize_data=False, _scope_='mmdet'))[index]


@pytest.mark.parametrize('kind', FORMATS)
def test_odd_formats_are_read_as_colours(boxes: Path, kind: str) -> None:
    (boxes / 'images/0.jpg').write_bytes(FORMATS[kind]())
    report = only(config(coco_dataset(boxes)))
    assert not report.errors + report.warnings
    assert tuple(load(boxes)['inputs'].shape) == (3, *SIZE)


def test_16_bit_images_that_a_model_gets_dark(boxes: Path) -> None:
    """12 of 16 bits reach it as 0 to 15; a training says so too."""
    Image.fromarray(np.full(SIZE, 4095, np.uint16)).save(boxes / 'images/0.jpg', 'PNG')
    for thorough in (True, False):
        (warning,) = only(config(coco_dataset(boxes)), thorough=thorough).warnings
        assert '15 of 255' in warning
    Image.fromarray(np.ones(SIZE, np.float32)).save(boxes / 'images/0.jpg', 'TIFF')
    assert 'floating-point' in only(config(coco_dataset(boxes))).errors[0]
    picture(0).save(boxes / 'images/0.jpg')


def test_damaged_images(boxes: Path) -> None:
    """Cut off anywhere, empty, or something else: found in every format."""

    def check(value: tuple[str, float]) -> None:
        kind, part = value
        whole = FORMATS[kind]()
        # The last 16 bytes of a PNG are checksums, and an end without content.
        (boxes / 'images/1.jpg').write_bytes(whole[: int(part * (len(whole) - 16))])
        report = only(config(coco_dataset(boxes)))
        assert [e for e in report.errors if e.startswith('1 × ') and 'images/1.jpg' in e], str(
            report
        )

    run_cases(st.tuples(st.sampled_from(sorted(FORMATS)), st.floats(0, 0.97)), check, 40)
    for content, kind in ((b'no picture', 'not images'), (b'', 'empty images')):
        (boxes / 'images/1.jpg').write_bytes(content)
        assert any(kind in e for e in only(config(coco_dataset(boxes))).errors)
    (boxes / 'images/1.jpg').unlink()
    cfg = config(coco_dataset(boxes))
    assert any('do not exist' in e for e in only(cfg).errors)
    # Before a training, a few of the files are looked for.
    refused(lambda: check_data(cfg), '1 of 4 images', 'data_prefix', kind=DataError)
    picture(1).save(boxes / 'images/1.jpg')


@pytest.mark.parametrize('as_stored', [True, False])
@pytest.mark.parametrize('orientation', [1, 3, 6, 8])
def test_exif_turns_images(
    boxes: Path, monkeypatch: pytest.MonkeyPatch, orientation: int, as_stored: bool
) -> None:
    """Annotations must have the sizes of the turned image, since OpenCV turns images by EXIF."""
    messages: list[str] = []
    monkeypatch.setattr(
        'mmvttt.openmmlab.reliability.seeded_dataset.print_log',
        lambda text, *_: messages.append(text),
    )
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = orientation >= 5
    height, width = SIZE
    picture(0).save(boxes / 'images/0.jpg', exif=exif)
    content = coco()
    if turned and not as_stored:
        height, width = width, height
        content['images'][0].update(height=height, width=width)
    write(boxes, content)
    wrong = [e for e in only(config(coco_dataset(boxes))).errors if 'another size' in e]
    # A training names the first one.
    data = SeededDataset(dict(coco_dataset(boxes), _scope_='mmdet'))
    assert [len(data[number]) for number in (0, 1, 0)] == [2, 2, 2]
    if turned and as_stored:
        assert '(64, 48), turned by EXIF; annotated as (48, 64)' in wrong[0]
        (message,) = messages
        assert "0.jpg' has height and width (64, 48), and is annotated as (48, 64)" in message
    else:
        assert wrong == messages == []
        assert tuple(load(boxes)['inputs'].shape) == (3, height, width)
    picture(0).save(boxes / 'images/0.jpg')
    write(boxes, coco())


# -------------------------------------------------------------------------------------- label maps


def test_label_maps_without_fault(labels: Path) -> None:
    """A palette and single bits are fine too."""
    pixels = np.resize(np.array([0, 1, 2], np.uint8), SIZE)
    image = Image.fromarray(pixels)
    image.putpalette(list(range(256)) * 3)
    image.save(labels / 'ann/1.png')
    Image.fromarray(pixels > 1).save(labels / 'ann/2.png')
    cfg = config(label_dataset(labels), 'mmseg')
    report = only(cfg)
    assert not report.errors + report.warnings
    check_data(cfg)
    (labels / 'a.txt').write_text('0\n2\n')
    assert not only(config(label_dataset(labels, ann_file='a.txt'), 'mmseg')).errors


def test_wrong_numbers_in_label_maps(labels: Path) -> None:
    """The numbers that mmsegmentation reads are those reported, before a training too."""

    def check(value: tuple[list[int], bool, bool, int]) -> None:
        numbers, reduce, subset, heads = value
        pixels = np.resize(np.array(numbers, np.uint8), SIZE)
        Image.fromarray(pixels).save(labels / 'ann/1.png')
        changes = dict(reduce_zero_label=reduce)
        if subset:
            changes |= dict(type='LoveDADataset', metainfo=dict(classes=('road', 'forest')))
            changes |= dict(seg_map_suffix='.png')
        model = dict(decode_head=dict(num_classes=heads))
        cfg = config(label_dataset(labels, **changes), 'mmseg', model=model)
        dataset = DATASETS.build(
            dict(cfg.train_dataloader.dataset, serialize_data=False, _scope_='mmseg')
        )
        seen = set(np.unique(dataset[1]['data_samples'].gt_sem_seg.data).tolist())
        assert {_label(int(n), dataset) for n in np.unique(pixels)} == seen
        limit = min(heads, len(dataset.metainfo['classes']))
        wrong = sorted(n for n in seen if n >= limit and n != 255)
        errors = [e for e in only(cfg).errors if 'ann/1.png' in e]
        assert bool(errors) == bool(wrong)
        if wrong:
            assert f'outside the {limit} classes' in errors[0]
            assert f'({", ".join(map(str, wrong[:6]))})' in errors[0]
            # A head that knows less than the classes is named first.
            fewer = heads < len(dataset.metainfo['classes'])
            words = 'has num_classes' if fewer else f'outside the {limit} classes'
            refused(lambda: check_data(cfg), words, kind=DataError)

    numbers = st.lists(st.integers(0, 3) | st.integers(0, 255), min_size=1, max_size=8)
    values = st.tuples(numbers, st.booleans(), st.booleans(), st.integers(2, 4))
    run_cases(values, check, 30)


MAPS: dict[str, tuple[Callable[[Path], object], str]] = {
    'missing': (lambda p: p.unlink(), 'do not exist'),
    'text': (lambda p: p.write_text('labels'), 'not label maps'),
    'colours': (lambda p: picture(0).save(p), 'several channels'),
    '16 bits': (
        lambda p: Image.fromarray(np.full(SIZE, 300, np.uint16)).save(p),
        'numbers above 255',
    ),
    'other size': (
        lambda p: Image.fromarray(np.zeros((24, 32), np.uint8)).save(p),
        'another size',
    ),
    'truncated': (lambda p: p.write_bytes(p.read_bytes()[:-40]), 'truncated'),
}


@pytest.mark.parametrize('name', MAPS)
def test_damaged_label_maps(labels: Path, name: str) -> None:
    damage, kind = MAPS[name]
    damage(labels / 'ann/1.png')
    errors = only(config(label_dataset(labels), 'mmseg')).errors
    assert [e for e in errors if kind in e and '1.png' in e], errors


def test_maps_that_a_user_s_transform_translates(labels: Path) -> None:
    picture(0).save(labels / 'ann/1.png')
    dataset = label_dataset(labels)
    dataset['pipeline'].insert(2, dict(type='ColoursToLabels'))
    head = dict(num_classes=3, ignore_index=0)
    check_data(config(dataset, 'mmseg', model=dict(decode_head=head)))


def test_no_images_for_the_suffix(labels: Path) -> None:
    cfg = config(label_dataset(labels, img_suffix='.tif'), 'mmseg')
    refused(lambda: check_data(cfg), '*.tif', 'img_suffix', kind=DataError)


def test_classes_without_a_pixel_and_classes_that_cannot_be(labels: Path) -> None:
    classes = ('sky', 'road', 'tree', 'car')
    report = only(config(label_dataset(labels, metainfo=dict(classes=classes)), 'mmseg'))
    assert report.warnings == ["1 × classes without a pixel: 'car' (3)"]
    other = label_dataset(labels, type='ADE20KDataset', metainfo=dict(classes=('no class',)))
    refused(lambda: check_data(config(other, 'mmseg')), 'cannot be built', kind=DataError)


# ----------------------------------------------------------------------------------- class folders


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    pytest.importorskip('mmpretrain')
    make_folders(tmp_path / 'train')
    return tmp_path / 'train'


def pretrain(root: Path, classes: int = 3, **changes: object) -> object:
    model = dict(head=dict(num_classes=classes))
    return config(folder_dataset(root, **changes), 'mmpretrain', model=model)


def test_damaged_folders(folders: Path) -> None:
    report = only(pretrain(folders))
    assert not report.errors + report.warnings
    assert report.classes == ('ash', 'elm', 'oak')
    assert report.summary.startswith('3 images in')
    check_data(pretrain(folders))
    refused(lambda: check_data(pretrain(folders, 2)), '3 folders', '2 classes', kind=DataError)
    (folders / 'elm/a.jpg').write_text('no image')
    assert any('not images' in e for e in only(pretrain(folders)).errors)
    for name in ('ash', 'elm', 'oak'):
        (folders / name / 'a.jpg').unlink()
    assert 'Found 0 files' in only(pretrain(folders)).errors[0]
    for name in ('ash', 'elm', 'oak'):
        (folders / name).rmdir()
    refused(lambda: check_data(pretrain(folders)), 'has no folders', kind=DataError)
    # The folder of a split that the class itself adds.
    other = dict(type='ImageNet', data_root=str(folders), data_prefix='', split='val')
    refused(lambda: check_data(pretrain(folders, **other)), 'is not a folder', kind=DataError)


def test_folders_of_validation_must_be_those_of_training(folders: Path, tmp_path: Path) -> None:
    """mmpretrain numbers the folders of each by themselves."""
    cfg = pretrain(folders, 4)
    cfg.val_dataloader = dict(dataset=folder_dataset(tmp_path / 'val'))
    for names in ('ash', 'elm', 'oak'), ('ash', 'oak'), ('ash', 'elm', 'oak', 'yew'):
        shutil.rmtree(tmp_path / 'val', ignore_errors=True)
        make_folders(tmp_path / 'val', names)
        if len(names) == 3:
            check_data(cfg)
        else:
            refused(lambda: check_data(cfg), 'the same classes', kind=DataError)


@pytest.mark.parametrize(
    ('line', 'error'),
    [
        ('oak/a.jpg 2', None),
        ('oak/a.jpg 3', 'outside the 3 classes'),
        ('oak/a.jpg -1', 'outside the 3 classes'),
        ('oak/b.jpg 1', 'do not exist'),
        ('oak/a.jpg', 'a list needs a file and the number'),
        ('a b', 'a list needs a file and the number'),
    ],
)
def test_lists_of_files(folders: Path, line: str, error: str | None) -> None:
    """A line is a file and a number of a class."""
    (folders.parent / 'list.txt').write_text(f'ash/a.jpg 0\n{line}\n')
    errors = only(pretrain(folders, ann_file=str(folders.parent / 'list.txt'))).errors
    assert not errors if error is None else error in errors[0]


def test_folders_of_other_classes_and_crops_of_photographs(tmp_path: Path) -> None:
    make_folders(tmp_path)
    named = folder_dataset(tmp_path, metainfo=dict(classes=['ash', 'elm']))
    message, *_ = only(config(named, 'mmpretrain')).errors
    assert '3 folders, and CustomDataset 2 classes' in message
    crop = dict(type='RandomCrop', crop_size=8, padding=1)
    for before, errors in (([], 1), ([dict(type='ResizeEdge', scale=8)], 0)):
        cut = folder_dataset(tmp_path, pipeline=[*before, crop])
        assert len(only(config(cut, 'mmpretrain')).errors) == errors
