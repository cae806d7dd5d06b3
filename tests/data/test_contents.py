"""Digests of data: by contents, not by paths."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

from mmvttt.openmmlab.data.contents import dataset_digest, file_digest
from mmvttt.openmmlab.datasets.latents import CachedLatents


def make_cache(folder: Path, value: int) -> None:
    folder.mkdir()
    np.save(folder / 'moments.npy', np.full((2, 2, 2, 1, 1), value, np.float16))
    np.save(folder / 'class_labels.npy', np.zeros(2, np.int64))
    (folder / 'latents.json').write_text(json.dumps(dict(images=2, scale=1.0, shift=0.0)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / 'one'
    folder.mkdir()
    for number in range(3):
        (folder / f'{number}.bmp').write_bytes(bytes([number]) * 10_000)
    (folder / 'a.json').write_text(json.dumps([1, 2]))
    return folder


class Set:
    """A data set with the methods of a toolbox's."""

    def __init__(self, folder: Path, labels: tuple[int, ...] = (0, 1, 1)) -> None:
        self.ann_file = str(folder / 'a.json')
        self.samples = [
            dict(
                img_path=str(folder / f'{i}.bmp'), instances=[dict(bbox_label=label)], sample_idx=i
            )
            for i, label in enumerate(labels)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def get_data_info(self, index: int) -> dict:
        return self.samples[index]


def both_digests(folder: Path) -> tuple:
    return file_digest(folder / 'a.json'), dataset_digest(Set(folder))


def test_moved_data_has_the_same_digest(folder: Path) -> None:
    moved = folder.with_name('two')
    shutil.copytree(folder, moved)
    assert both_digests(folder) == both_digests(moved)
    wrapped, other = (
        SimpleNamespace(dataset=SimpleNamespace(files=[f]))
        for f in (folder / 'a.json', moved / 'a.json')
    )
    assert dataset_digest(wrapped) == dataset_digest(other) is not None


def write_middle(path: Path) -> None:
    with path.open('r+b') as file:
        file.seek(path.stat().st_size // 2)
        file.write(b'x')


@pytest.mark.parametrize(
    ('change', 'changed'),
    [
        # A picture of the same size, an annotation, another file.
        (lambda f: (f / '1.bmp').write_bytes(b'x' * 10_000), (False, True)),
        (lambda f: write_middle(f / '1.bmp'), (False, True)),
        (lambda f: (f / 'a.json').write_text('[1, 3]'), (True, True)),
        (lambda f: (f / 'readme.txt').write_text(''), (False, False)),
    ],
)
def test_other_contents(folder: Path, change: object, changed: tuple[bool, ...]) -> None:
    before = both_digests(folder)
    change(folder)
    now = both_digests(folder)
    assert tuple(a != b for a, b in zip(before, now, strict=True)) == changed


def test_parts_of_a_large_file_come_from_everywhere(tmp_path: Path) -> None:
    path = tmp_path / 'a'
    digests = set()
    for part in range(-1, 8):
        path.write_bytes(bytes(2**20))
        if part >= 0:
            with path.open('r+b') as file:
                file.seek(part * 2**17)
                file.write(b'x' * 2**17)
        digests.add(file_digest(path, most=2**16))
    assert len(digests) == 9


def test_caches_of_latents(tmp_path: Path) -> None:
    digests = set()
    for name, value in (('a', 0), ('b', 1), ('c', 1)):
        make_cache(tmp_path / name, value)
        joined = ConcatDataset([CachedLatents(tmp_path / name), CachedLatents(tmp_path / 'a')])
        digests.add((dataset_digest(CachedLatents(tmp_path / name)), dataset_digest(joined)))
    assert len(digests) == 2
    assert None not in {*next(iter(digests))}


def test_annotations_inside_of_wrappers_count(folder: Path) -> None:
    digests = set()
    for content in '[1, 2]', '[1, 3]':
        (folder / 'a.json').write_text(content)
        # Repeated, and joined with another.
        joined, repeated = Set(folder), Set(folder)
        joined.datasets, joined.ann_file = [repeated], None
        repeated.dataset, repeated.ann_file = Set(folder), None
        digests.add(dataset_digest(joined))
    assert len(digests) == 2


def test_labels_and_arrays_count(folder: Path) -> None:
    assert dataset_digest(Set(folder)) != dataset_digest(Set(folder, (1, 1, 1)))
    arrays = Set(folder)
    digests = set()
    for value in range(2):
        arrays.samples[0]['img'] = np.full((8, 8, 3), value, np.uint8)
        digests.add(dataset_digest(arrays))
    assert len(digests) == 2
    assert dataset_digest([1, 2]) is None
