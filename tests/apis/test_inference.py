"""Photographs through a model of each toolbox, and its data set, drawn by its own visualizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from mmvttt.errors import (
    CheckpointMismatchError,
    UsageError,
)
from mmvttt.openmmlab.apis.inference import open_model, require_image, show_images, show_video

from ..configs.reduced import build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


@pytest.fixture(scope='module')
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scenes in CamVid's layout: a bright box on dark ground is class 1."""
    root = tmp_path_factory.mktemp('scenes')
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        images, labels = root / 'img_dir' / split, root / 'ann_dir' / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for i in range(3):
            label = np.zeros((48, 64), np.uint8)
            label[8:30, 10 + 8 * i : 40 + 8 * i] = 1
            image = rng.integers(0, 60, (48, 64, 3)) + 150 * label[..., None]
            cv2.imwrite(str(images / f'{i}.jpg'), image)
            cv2.imwrite(str(labels / f'{i}.png'), label)
    return root


def small(name: str, root: Path) -> Config:
    """A config with a tiny model, on the scenes."""
    cfg = reduce_model(Config.fromfile(CONFIGS / f'{name}.py'))
    if cfg.default_scope == 'mmpretrain':
        cfg.model.head.num_classes = cfg.data_preprocessor.num_classes = 7
    if cfg.default_scope == 'mmseg':
        for split in ('train', 'val', 'test'):
            cfg[f'{split}_dataloader'].dataset.data_root = str(root)
    return cfg


def binary(name: str, root: Path) -> Config:
    """A segmentor of one channel, whose sign is the class."""
    cfg = small(name, root)
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


def is_picture(path: Path) -> bool:
    return path.is_file() and cv2.imread(str(path)) is not None


@pytest.mark.parametrize(('make', 'classes'), [(small, 11), (binary, 2)], ids=['', 'binary'])
def test_a_segmentor_draws_a_label_map(
    make: Callable, classes: int, scenes: Path, tmp_path: Path
) -> None:
    cfg = make('upernet_vittt_t_camvid', scenes)
    names = [f'kind-{i}' for i in range(classes)]
    checkpoint = save_random(cfg, tmp_path / 'w.pth', names)
    images = sorted((scenes / 'img_dir' / 'val').glob('*.jpg'))[:2]
    findings = list(show_images(cfg, checkpoint, images, tmp_path / 'out'))
    assert [f.image for f in findings] == images
    for finding in findings:
        assert is_picture(finding.picture)
        found, shares = zip(*(line.split() for line in finding.lines), strict=True)
        assert set(found) <= set(names)
        assert sum(float(s.rstrip('%')) for s in shares) == pytest.approx(100, abs=1)


def test_a_segmentor_with_another_model_s_checkpoint(scenes: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / 'detector.pth'
    meta = dict(dataset_meta=dict(classes=('person',)))
    torch.save(dict(state_dict={'rpn_head.weight': torch.zeros(3)}, meta=meta), checkpoint)
    images = sorted((scenes / 'img_dir' / 'val').glob('*.jpg'))[:1]
    with pytest.raises(CheckpointMismatchError, match=r'detector\.pth'):
        list(show_images(small('upernet_vittt_t_camvid', scenes), checkpoint, images, tmp_path))


def test_a_classifier_names_the_five_likeliest(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmpretrain.utils import progress

    # Left open, or nested in another, it has rich recurse in every later bar of the process.
    monkeypatch.setattr(progress.global_live, 'start', lambda: pytest.fail('a second bar'))
    cfg = small('vittt_t_in1k', scenes)
    checkpoint = save_random(cfg, tmp_path / 'w.pth', [f'kind-{i}' for i in range(7)])
    image = scenes / 'img_dir' / 'val' / '0.jpg'
    (finding,) = show_images(cfg, checkpoint, [image], tmp_path / 'out')
    assert is_picture(finding.picture)
    names, scores = zip(*(line.split() for line in finding.lines), strict=True)
    assert len(set(names)) == 5
    assert list(scores) == sorted(scores, reverse=True)


def test_a_detector_names_its_boxes(scenes: Path, tmp_path: Path) -> None:
    cfg = small('maskrcnn_vittt_t_pennfudan', scenes)
    checkpoint = save_random(cfg, tmp_path / 'w.pth', ('person',))
    image = scenes / 'img_dir' / 'val' / '0.jpg'
    (finding,) = show_images(cfg, checkpoint, [image], tmp_path / 'out', score_thr=0.05)
    assert is_picture(finding.picture)
    # An untrained head gives 0.5 for each of two classes.
    assert finding.lines
    assert all(line.startswith('person 0.') for line in finding.lines)
    (nothing,) = show_images(cfg, checkpoint, [image], tmp_path / 'none', score_thr=0.99)
    assert nothing.lines == []


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Four frames of 64×48 pixels, 10 a second."""
    path = tmp_path / 'clip.mp4'
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*'mp4v'), 10, (64, 48))
    for i in range(4):
        writer.write(np.full((48, 64, 3), 60 * i, np.uint8))
    writer.release()
    return path


@pytest.mark.parametrize('name', ['upernet_vittt_t_camvid', 'vittt_t_in1k'])
def test_a_video_is_drawn_frame_by_frame(
    name: str, scenes: Path, clip: Path, tmp_path: Path
) -> None:
    cfg = small(name, scenes)
    classes = tuple(f'kind {i}' for i in range(11 if 'camvid' in name else 7))
    checkpoint = save_random(cfg, tmp_path / 'w.pth', classes)
    out = tmp_path / 'out' / 'clip.mp4'
    found = list(show_video(cfg, checkpoint, clip, out))
    assert len(found) == 4
    assert all(line.startswith('kind ') for lines in found for line in lines)
    written = cv2.VideoCapture(str(out))
    assert written.get(cv2.CAP_PROP_FRAME_COUNT) == 4
    assert written.get(cv2.CAP_PROP_FPS) == 10
    with pytest.raises(UsageError, match=r"no video.*'nothing\.mp4'"):
        next(show_video(cfg, checkpoint, 'nothing.mp4', out))


def test_the_page_shows_predictions(scenes: Path, tmp_path: Path) -> None:
    pytest.importorskip('gradio')
    from mmvttt.openmmlab.apis.page import build_page

    cfg = small('maskrcnn_vittt_t_pennfudan', scenes)
    checkpoint = save_random(cfg, tmp_path / 'w.pth', ('person',))
    page = build_page(cfg, checkpoint, 'pedestrians')
    photo = tmp_path / 'photo.png'
    Image.new('RGB', (64, 48)).save(photo)
    picture, words = page.fn(str(photo), 0.05)
    assert picture.shape == (48, 64, 3)
    assert words.startswith('person 0.')
    assert page.fn(None, 0.3) == (None, 'Choose an image first.')
    Image.new('1', (5001, 5000)).save(tmp_path / 'large.png')
    picture, words = page.fn(str(tmp_path / 'large.png'), 0.3)
    assert picture is None
    assert '5001×5000' in words
    # Gradio hands the file over as it is, and removes it in time.
    assert page.input_components[0].type == 'filepath'
    assert page.delete_cache[1] <= 3600


def test_images_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, script, text = (tmp_path / name for name in ('large.png', 'script.png', 'text.png'))
    Image.new('1', (400, 300)).save(large)
    # PostScript by content: Pillow would start Ghostscript to decode it.
    Image.new('RGB', (8, 8)).save(script, format='EPS')
    text.write_text('no image')
    require_image(large)
    require_image(large, 400 * 300)
    for path, message in (
        (script, 'files that are not images'),
        (text, 'files that are not images'),
    ):
        with pytest.raises(UsageError, match=message):
            require_image(path, 10**6)
    monkeypatch.setattr(Image.Image, 'load', lambda _: pytest.fail('decoded'))
    with pytest.raises(UsageError, match=r"'large\.png' has 400×300 pixels, and 119,999 are"):
        require_image(large, 400 * 300 - 1)


def test_what_cannot_be_shown_is_named(scenes: Path, tmp_path: Path) -> None:
    cfg = small('vittt_t_in1k', scenes)
    with pytest.raises(UsageError, match='no image'):
        list(show_images(cfg, 'w.pth', ['nowhere.jpg'], tmp_path))
    with pytest.raises(UsageError, match=r'default_scope.*mmdet, mmseg, mmpretrain'):
        list(show_images(Config(dict(default_scope='mmengine')), 'w.pth', [], tmp_path))
    torch.save({'state_dict': {'x.weight': torch.ones(1)}}, tmp_path / 'other.pth')
    image = scenes / 'img_dir' / 'val' / '0.jpg'
    with pytest.raises(CheckpointMismatchError):
        list(show_images(cfg, tmp_path / 'other.pth', [image], tmp_path))


def test_no_image_is_written_over(scenes: Path, tmp_path: Path) -> None:
    cfg = small('vittt_t_in1k', scenes)
    image = scenes / 'img_dir' / 'val' / '0.jpg'
    other, mine = tmp_path / 'a' / '0.jpg', tmp_path / 'out' / 'vis' / '0.jpg'
    for path in (other, mine):
        path.parent.mkdir(parents=True)
        path.write_bytes(image.read_bytes())
    with pytest.raises(UsageError, match=r'written over .*vis/0\.jpg.*another --out'):
        list(show_images(cfg, 'w.pth', [mine], mine.parent))
    with pytest.raises(UsageError, match=r"several images are called '0'.*--out"):
        list(show_images(cfg, 'w.pth', [image, other], tmp_path / 'out'))
    assert mine.read_bytes() == image.read_bytes()


@pytest.mark.parametrize('damage', ['without a head', 'of other classes'])
def test_a_head_of_random_weights_predicts_nothing(
    damage: str, scenes: Path, tmp_path: Path
) -> None:
    cfg = small('vittt_t_in1k', scenes)
    weights = build(cfg).state_dict()
    head = {n: v for n, v in weights.items() if n.startswith('head.')}
    for name, value in head.items():
        del weights[name]
        if damage == 'of other classes':
            weights[name] = torch.cat([value, value])
    torch.save(weights, tmp_path / 'weights.pth')
    with pytest.raises(CheckpointMismatchError, match=r'would leave 2 tensors .* at random: head'):
        open_model(cfg, tmp_path / 'weights.pth')
