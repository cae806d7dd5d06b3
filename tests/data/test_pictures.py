"""Image files and label maps of all formats, whole and damaged, as the toolboxes read them."""

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
from mmvttt.openmmlab.data.findings import Findings
from mmvttt.openmmlab.data.images import read_image
from mmvttt.openmmlab.data.labels import _label
from mmvttt.openmmlab.reliability import SeededDataset

from ..bad_input.cases import refused, run_cases
from .sets import (
    SIZE,
    check_annotations,
    check_data,
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


@pytest.mark.parametrize('as_stored', [True, False])
@pytest.mark.parametrize('orientation', [1, 3, 6, 8])
def test_exif_turns_images(
    boxes: Path, logged: list[str], orientation: int, as_stored: bool
) -> None:
    """Annotations must have the sizes of the turned image, since OpenCV turns images by EXIF."""
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
        (message,) = logged
        assert "0.jpg' has height and width (64, 48), and is annotated as (48, 64)" in message
    else:
        assert wrong == logged == []
        assert tuple(load(boxes)['inputs'].shape) == (3, height, width)


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


def test_folders_of_validation_must_be_those_of_training(folders: Path, tmp_path: Path) -> None:
    """mmpretrain numbers the folders of each by themselves."""
    cfg = config(folder_dataset(folders), 'mmpretrain', model=dict(head=dict(num_classes=4)))
    cfg.val_dataloader = dict(dataset=folder_dataset(tmp_path / 'val'))
    for names in ('ash', 'elm', 'oak'), ('ash', 'oak'), ('ash', 'elm', 'oak', 'yew'):
        shutil.rmtree(tmp_path / 'val', ignore_errors=True)
        make_folders(tmp_path / 'val', names)
        if len(names) == 3:
            check_data(cfg)
        else:
            refused(lambda: check_data(cfg), 'the same classes', kind=DataError)


def test_a_large_picture_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / 'tile.png')
    picture(0).save(path)
    # As an aerial image of 190 million pixels.
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    facts = read_image(path)
    assert (facts.problem, facts.size) == (None, None)
