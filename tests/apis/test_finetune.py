"""`mmvttt finetune`: what it says and writes; what data of each kind learns from 40 pictures."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

import mmvttt
from mmvttt.errors import UsageError

DATA = Path(os.environ.get('MMVTTT_DATA', Path(__file__).parents[3] / 'shared/data'))
BICYCLIST = 10


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Ten red and ten blue pictures."""
    rng = np.random.default_rng(0)
    for label, channel in (('red', 0), ('blue', 2)):
        (tmp_path / 'set' / label).mkdir(parents=True)
        for name in range(10):
            pixels = rng.integers(0, 60, (32, 32, 3), np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(tmp_path / 'set' / label / f'{name}.png')
    return tmp_path / 'set'


def test_a_training_is_reported_and_resumed(colours: Path, tmp_path: Path) -> None:
    options = dict(work_dir=tmp_path / 'out', steps=4)
    lines: list[str] = []
    model = mmvttt.finetune(colours, say=lines.append, **options)
    assert len(lines) <= 30
    assert [line.split()[:2] for line in lines if 'step ' in line] == [
        ['step', str(n)] for n in range(1, 5)
    ]
    prediction = model.predict(colours / 'red' / '0.png')
    assert list(prediction.classes) == ['blue', 'red']
    assert len(list((tmp_path / 'out' / 'predictions').iterdir())) == 4
    # The last line predicts.
    config, checkpoint = lines[-1].split()[3:5]
    again = mmvttt.load(config, checkpoint, device='cpu').predict(colours / 'red' / '0.png')
    assert np.allclose(again.scores, prediction.scores, atol=1e-5)
    # The config is read, with what a user has changed in it, and the run goes on.
    path = Path(config)
    path.write_text(path.read_text().replace('epochs = 32, 16, 4', 'epochs = 32, 16, 6'))
    more: list[str] = []
    mmvttt.finetune(colours, say=more.append, **options)
    assert [line.split()[1] for line in more if line.startswith('  step ')] == ['5', '6']
    with pytest.raises(UsageError, match='another --work-dir'):
        mmvttt.finetune(colours, 'cifar10_vit_nano', **options)
    with pytest.raises(UsageError, match='classes need one of mmpretrain'):
        mmvttt.finetune(colours, 'pedestrians', work_dir=tmp_path / 'other')


def scenes(part: str, count: int, value: int | None = None) -> list[tuple[Path, np.ndarray]]:
    """Pictures of CamVid with their labels, spread over it; with `value` those that show it."""
    folder = DATA / 'camvid'
    if not folder.is_dir():
        pytest.skip(f'{folder} is missing: set MMVTTT_DATA')
    pairs = []
    for path in sorted((folder / 'img_dir' / part).glob('*.jpg')):
        labels = np.asarray(Image.open(folder / 'ann_dir' / part / f'{path.stem}.png'))
        if value is None or largest(labels == value):
            pairs.append((path, labels))
    return [pairs[i] for i in np.linspace(0, len(pairs) - 1, count).round().astype(int)]


def largest(mask: np.ndarray) -> int:
    return max((int((mask == i).sum()) for i in instances(mask)), default=0)


def instances(mask: np.ndarray, least: int = 400) -> list[np.ndarray]:
    numbers, count = ndimage.label(mask, np.ones((3, 3)))
    return [m for m in (numbers == i + 1 for i in range(count)) if m.sum() >= least]
