"""tools/dev/small_sets.py: which images go where, and what is written about them."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[2] / 'tools' / 'dev' / 'small_sets.py'


@pytest.fixture
def write(tmp_path, monkeypatch):
    def run(name: str) -> Path:
        monkeypatch.setattr(
            sys, 'argv', ['', name, str(tmp_path / 'source'), str(tmp_path / 'out')]
        )
        runpy.run_path(str(SCRIPT), run_name='__main__')
        return tmp_path / 'out'

    return run


def test_pennfudan(write, tmp_path: Path) -> None:
    pytest.importorskip('pycocotools')
    for folder in ('PNGImages', 'PedMasks'):
        (tmp_path / 'source' / folder).mkdir(parents=True)
    labels = np.zeros((40, 60), np.uint8)
    labels[10:30, 20:26], labels[5:35, 40:50] = 1, 2
    # For validation, for training, not used.
    for name in ('FudanPed00001', 'FudanPed00002', 'FudanPed00004'):
        Image.new('RGB', (60, 40)).save(tmp_path / f'source/PNGImages/{name}.png')
        Image.fromarray(labels).save(tmp_path / f'source/PedMasks/{name}_mask.png')
    annotations = write('pennfudan') / 'annotations'
    val = json.loads((annotations / 'instances_val.json').read_text())
    assert [image['file_name'] for image in val['images']] == ['FudanPed00001.jpg']
    assert [person['bbox'] for person in val['annotations']] == [[20, 10, 6, 20], [40, 5, 10, 30]]
    train = json.loads((annotations / 'instances_train.json').read_text())
    assert [image['file_name'] for image in train['images']] == ['FudanPed00002.jpg']


def test_camvid(write, tmp_path: Path) -> None:
    for folder in ('train', 'trainannot', 'val', 'valannot'):
        (tmp_path / 'source' / folder).mkdir(parents=True)
        for name in 'abcd':
            image = Image.fromarray(np.array([[3, 11]], np.uint8))
            image.save(tmp_path / f'source/{folder}/{name}.png')
    out = write('camvid')
    assert sorted(p.name for p in (out / 'img_dir/train').iterdir()) == ['a.jpg', 'd.jpg']
    assert sorted(p.name for p in (out / 'ann_dir/val').iterdir()) == ['a.png', 'c.png']
    assert np.array(Image.open(out / 'ann_dir/val/a.png')).tolist() == [[3, 255]]
