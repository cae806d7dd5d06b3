"""Photographs through a model of each toolbox, and its data set, drawn by its own visualizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

import mmvttt
from mmvttt.errors import CheckpointMismatchError, UsageError
from mmvttt.openmmlab.apis.inference import (
    Prediction,
    open_model,
    require_images,
)

from ..configs.reduced import build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


@pytest.fixture(scope='module')
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bright box on dark ground."""
    pixels = np.random.default_rng(0).integers(0, 60, (48, 64, 3))
    pixels[8:30, 10:40] += 150
    path = tmp_path_factory.mktemp('photos') / '0.jpg'
    cv2.imwrite(str(path), pixels)
    return path


def small(name: str) -> Config:
    """A config with a tiny model."""
    cfg = reduce_model(Config.fromfile(CONFIGS / f'{name}.py'))
    if cfg.default_scope == 'mmpretrain':
        cfg.model.head.num_classes = cfg.data_preprocessor.num_classes = 7
    return cfg


def binary(name: str) -> Config:
    """A segmentor of one channel, whose sign is the class."""
    cfg = small(name)
    for head in (cfg.model.decode_head, cfg.model.auxiliary_head):
        head.update(num_classes=2, out_channels=1, threshold=0.5)
        head.loss_decode = dict(type='CrossEntropyLoss', use_sigmoid=True)
    return cfg


def save_random(cfg: Config, path: Path, classes: Sequence[str]) -> Path:
    model = build(cfg)
    model.init_weights()
    meta = dict(dataset_meta=dict(classes=tuple(classes), palette=[]))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), path)
    return path


@pytest.fixture(scope='module')
def detector(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A config and a checkpoint of a detector of people."""
    folder = tmp_path_factory.mktemp('detector')
    cfg = small('maskrcnn_vittt_t_pennfudan')
    cfg.dump(folder / 'small.py')
    return folder / 'small.py', save_random(cfg, folder / 'w.pth', ('person',))


def is_picture(prediction: Prediction, path: Path) -> bool:
    prediction.save(path)
    return cv2.imread(str(path)) is not None


@pytest.mark.parametrize(('make', 'classes'), [(small, 11), (binary, 2)], ids=['', 'binary'])
def test_a_segmentor_draws_a_label_map(
    make: Callable, classes: int, image: Path, tmp_path: Path
) -> None:
    cfg = make('upernet_vittt_t_camvid')
    names = [f'kind-{i}' for i in range(classes)]
    checkpoint = save_random(cfg, tmp_path / 'w.pth', names)
    prediction = open_model(cfg, checkpoint).predict(image)
    assert is_picture(prediction, tmp_path / 'out.png')
    assert prediction.labels.shape == (48, 64)
    found, shares = zip(*(line.split() for line in prediction.lines), strict=True)
    assert set(found) <= set(names)
    assert sum(float(s.rstrip('%')) for s in shares) == pytest.approx(100, abs=1)


def test_a_classifier_names_the_five_likeliest(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmpretrain.utils import progress

    # Left open, or nested in another, it has rich recurse in every later bar of the process.
    monkeypatch.setattr(progress.global_live, 'start', lambda: pytest.fail('a second bar'))
    cfg = small('vittt_t_in1k')
    checkpoint = save_random(cfg, tmp_path / 'w.pth', [f'kind-{i}' for i in range(7)])
    prediction = open_model(cfg, checkpoint).predict(image)
    assert is_picture(prediction, tmp_path / 'out.png')
    assert prediction.scores.sum() == pytest.approx(1, abs=1e-5)
    names, scores = zip(*(line.split() for line in prediction.lines), strict=True)
    assert len(set(names)) == 5
    assert list(scores) == sorted(scores, reverse=True)


def test_a_detector_s_boxes_for_a_file_an_image_and_pixels(
    image: Path, detector: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = mmvttt.load(*detector, device='cpu')
    prediction = predictor.predict(image, score_thr=0.05)
    assert is_picture(prediction, tmp_path / 'out.png')
    # An untrained head gives 0.5 for each of two classes.
    assert prediction.lines
    assert all(line.startswith('person 0.') for line in prediction.lines)
    assert predictor.predict(image, score_thr=0.99).lines == []
    opened = Image.open(image).convert('RGB')
    first, *others = predictor.predict([image, str(image), opened, np.asarray(opened)], 0.05)
    count = len(first.boxes)
    assert count
    assert first.boxes.shape == (count, 4)
    assert first.scores.shape == first.labels.shape == (count,)
    assert first.masks.shape == (count, 48, 64)
    assert first.masks.dtype == bool
    # A preprocessor beside the model, as mmengine's Runner takes it.
    beside = Config.fromfile(detector[0])
    beside.data_preprocessor = beside.model.pop('data_preprocessor')
    # And a pipeline inside of a wrapper.
    datasets = [beside.test_dataloader.dataset]
    beside.test_dataloader.dataset = dict(type='ConcatDataset', datasets=datasets)
    others.append(open_model(beside, detector[1]).predict(image, 0.05))
    for other in others:
        np.testing.assert_allclose(other.boxes, first.boxes, atol=1e-3)
    # One that is grey, and upright only by its EXIF.
    assert predictor.predict(np.asarray(opened)[..., 0]).draw().shape == (48, 64, 3)
    exif = opened.getexif()
    exif[0x0112] = 6
    opened.save(tmp_path / 'lying.jpg', exif=exif)
    for lying in (tmp_path / 'lying.jpg', Image.open(tmp_path / 'lying.jpg')):
        assert predictor.predict(lying).draw().shape == (64, 48, 3)
    for wrong, message in (
        (np.zeros((4, 4, 3)), r'float64 \(4, 4, 3\): give uint8'),
        (np.zeros((4, 4, 4), np.uint8), r'uint8 \(4, 4, 4\)'),
        (7, 'an image is a int: give'),
        (Image.fromarray(np.zeros((4, 4), np.uint16)), r'uint16 \(4, 4, 3\)'),
    ):
        with pytest.raises(UsageError, match=message):
            predictor.predict(wrong)
    monkeypatch.setattr('mmcv.imread', lambda _: None)
    with pytest.raises(UsageError, match=r'OpenCV cannot read .*0\.jpg'):
        predictor.predict(image)


def test_a_model_without_weights_asks_for_them() -> None:
    with pytest.raises(UsageError, match=r"'maskrcnn_vittt_s_1x' needs a checkpoint.*pedestrians"):
        mmvttt.load('maskrcnn_vittt_s_1x')


def test_what_cannot_be_shown_is_named() -> None:
    with pytest.raises(UsageError, match=r'default_scope.*mmdet, mmseg, mmpretrain'):
        open_model(Config(dict(default_scope='mmengine')), 'w.pth')
    with pytest.raises(UsageError, match='no test_dataloader'):
        open_model(Config(dict(default_scope='mmdet', model=dict())), 'w.pth')


def test_no_image_is_written_over(image: Path, tmp_path: Path) -> None:
    other, mine = tmp_path / 'a' / '0.jpg', tmp_path / 'out' / 'vis' / '0.jpg'
    for path in (other, mine):
        path.parent.mkdir(parents=True)
        path.write_bytes(image.read_bytes())
    with pytest.raises(UsageError, match=r'written over .*vis/0\.jpg.*another --out'):
        require_images([mine], mine.parent)
    with pytest.raises(UsageError, match=r"several images are called '0'.*--out"):
        require_images([image, other], tmp_path / 'out')
    assert mine.read_bytes() == image.read_bytes()


@pytest.mark.parametrize('damage', ['without a head', 'of other classes'])
def test_a_head_of_random_weights_predicts_nothing(damage: str, tmp_path: Path) -> None:
    cfg = small('vittt_t_in1k')
    weights = build(cfg).state_dict()
    head = {n: v for n, v in weights.items() if n.startswith('head.')}
    for name, value in head.items():
        del weights[name]
        if damage == 'of other classes':
            weights[name] = torch.cat([value, value])
    torch.save(weights, tmp_path / 'weights.pth')
    with pytest.raises(CheckpointMismatchError, match=r'would leave 2 tensors .* at random: head'):
        open_model(cfg, tmp_path / 'weights.pth')
