"""The built-in data set: exact masks, held-out val, made once, whole or absent."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvttt.errors import OptionError, UsageError
from mmvttt.openmmlab.datasets import digits, make_digits

SIZE = 96
COUNTS = {'train': 40, 'val': 12}


def make(root: Path, **changes) -> Path:
    given = dict(num_train=COUNTS['train'], num_val=COUNTS['val'], size=SIZE, seed=3)
    return make_digits(root, **{**given, **changes})


def read(root: Path, split: str) -> dict:
    return json.loads((root / 'annotations' / f'instances_{split}.json').read_text())


def pixels(root: Path, split: str, image: dict) -> np.ndarray:
    return np.asarray(Image.open(root / split / image['file_name']))


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob('*')) if p.is_file()
    }


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp('digits') / 'set')


@pytest.fixture(scope='module')
def photos() -> dict[str, np.ndarray]:
    return digits.load_photos()


@pytest.mark.parametrize('split', digits.SPLITS)
def test_masks_are_exactly_what_was_pasted(root, photos, split):
    """Outside of the masks all pixels are the photograph's; a mask is the shape of its digit."""
    coco_mask = pytest.importorskip('pycocotools.mask')
    coco = read(root, split)
    assert len(coco['images']) == len(list((root / split).iterdir())) == COUNTS[split]
    assert [c['name'] for c in coco['categories']] == list('0123456789')
    assert len({a['id'] for a in coco['annotations']}) == len(coco['annotations'])
    ink_of = {d.row: d for d in digits.load_digits()}
    for image in coco['images']:
        left, top, width, height = image['background']['crop']
        photo = photos[image['background']['photo']][top : top + height, left : left + width]
        differs = (pixels(root, split, image) != photo).any(axis=-1)
        covered = np.zeros((SIZE, SIZE), dtype=int)
        for annotation in (a for a in coco['annotations'] if a['image_id'] == image['id']):
            mask = coco_mask.decode(annotation['segmentation']).astype(bool)
            covered += mask
            assert annotation['area'] == mask.sum() > 0
            rows, columns = np.nonzero(mask)
            x, y, w, h = map(int, annotation['bbox'])
            assert (x, x + w - 1) == (columns.min(), columns.max())
            assert (y, y + h - 1) == (rows.min(), rows.max())
            digit = ink_of[annotation['digit']]
            assert annotation['category_id'] == digit.label + 1
            assert is_shape_of(mask[y : y + h, x : x + w], digit.ink)
        # Digits don't overlap, and nothing but digits was painted. A pen may match the photograph
        # on single pixels by chance, so not every masked pixel must differ.
        assert covered.max() == 1
        assert not (differs & ~covered.astype(bool)).any()
        assert (differs & covered.astype(bool)).sum() > 0.98 * covered.sum()


def is_shape_of(mask: np.ndarray, ink: np.ndarray) -> bool:
    """Whether some enlargement of this ink has exactly this mask, cut to its own extent."""
    sides = range(round(digits.SIDES[0] * SIZE), round(digits.SIDES[1] * SIZE) + 1)
    for side in sides:
        shape = digits._enlarge(ink, side) > digits.INK
        rows, columns = np.flatnonzero(shape.any(1)), np.flatnonzero(shape.any(0))
        cut = shape[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        if np.array_equal(cut, mask):
            return True
    return False


def test_val_shares_no_digit_with_train(root):
    train, val = ({a['digit'] for a in read(root, s)['annotations']} for s in digits.SPLITS)
    assert len(train) > COUNTS['train'] / 2
    assert not train & val


def test_val_shares_no_pixel_of_background_with_train(root, photos):
    """Each split's crops are marked on the photographs; the marks of the two never meet."""
    seen = {
        split: {name: np.zeros(p.shape[:2], dtype=bool) for name, p in photos.items()}
        for split in digits.SPLITS
    }
    for split, marks in seen.items():
        for image in read(root, split)['images']:
            left, top, width, height = image['background']['crop']
            marks[image['background']['photo']][top : top + height, left : left + width] = True
    assert sum(m.any() for m in seen['train'].values()) > len(photos) / 2
    for name in photos:
        assert not (seen['train'][name] & seen['val'][name]).any(), name


def test_same_seed_same_bytes_other_seed_other_images(root, tmp_path):
    assert contents(make(tmp_path / 'again')) == contents(root)
    other = read(make(tmp_path / 'other', seed=4), 'val')
    assert other['annotations'] != read(root, 'val')['annotations']


def test_cache_is_used_and_nothing_is_overwritten(root, tmp_path, monkeypatch):
    before = contents(root)
    monkeypatch.setattr(digits, '_build', lambda *_: pytest.fail('was built again'))
    assert make(root) == root
    (tmp_path / 'mine.txt').write_text('precious')
    for folder, options in ((root, dict(seed=4)), (tmp_path, {})):
        with pytest.raises(UsageError):
            make(folder, **options)
    assert contents(root) == before
    assert contents(tmp_path) == {'mine.txt': b'precious'}


def test_interrupted_build_leaves_no_half_set(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, 'coco_object', interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / 'set', num_train=3, num_val=1)
    assert not list(tmp_path.iterdir())


def test_a_size_without_disjoint_crops_is_refused(tmp_path):
    with pytest.raises(OptionError):
        make(tmp_path / 'set', size=400)
    assert not list(tmp_path.iterdir())
