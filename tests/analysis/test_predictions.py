"""Pictures of predictions, of boxes and of label maps: ground truth left, predictions right."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS as ROOT
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from PIL import Image

from mmvttt.analysis import predictions
from mmvttt.analysis.predictions import draw_predictions, tile
from mmvttt.datasets import make_digits
from mmvttt.errors import UsageError
from mmvttt.registry import MODELS

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
SIZE = 96


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
    """The demo's detector, smaller still, on five images of its own."""
    root = make_digits(tmp_path_factory.mktemp('digits') / 'set', 1, 5, SIZE)
    cfg = Config.fromfile(CONFIGS / 'maskrcnn_vittt_demo.py')
    cfg.model.backbone.backbone.arch = dict(
        embed_dims=32, num_layers=4, num_heads=1, feedforward_channels=32
    )
    cfg.model.neck.in_channels = [32] * 4
    cfg.test_dataloader.dataset.data_root = str(root)
    # Another size than the files': annotations and predictions must come back to theirs.
    cfg.test_dataloader.dataset.pipeline[1].scale = (64, 64)
    return cfg


@pytest.fixture(scope='module')
def checkpoint(config, tmp_path_factory) -> Path:
    init_default_scope('mmdet')
    path = tmp_path_factory.mktemp('weights') / 'epoch_1.pth'
    torch.save(dict(state_dict=MODELS.build(config.model).state_dict()), path)
    return path


def test_pictures_hold_ground_truth_and_predictions(config, checkpoint, tmp_path, monkeypatch):
    drawn = []
    enlarge = predictions._enlarge

    def spy(image, sample):
        image, sample = enlarge(image, perfect(sample))
        drawn.append((image, sample))
        return image, sample

    def perfect(sample):
        truth = sample.gt_instances
        sample.pred_instances = InstanceData(
            bboxes=truth.bboxes,
            labels=truth.labels,
            scores=torch.ones(len(truth)),
            masks=torch.from_numpy(truth.masks.masks.astype(bool)),
        )
        return sample

    monkeypatch.setattr(predictions, '_enlarge', spy)
    files = draw_predictions(config, checkpoint, tmp_path / 'out', num_images=3)
    # Evenly spread over the five images, the first and the last among them.
    assert [f.name for f in files] == ['000000.png', '000002.png', '000004.png']
    assert sorted((tmp_path / 'out').iterdir()) == files
    for file, (image, sample) in zip(files, drawn, strict=True):
        picture = np.asarray(Image.open(file))
        assert image.shape == (480, 480, 3)
        assert picture.shape == (480, 960, 3)
        left, right = picture[:, :480], picture[:, 480:]
        masks = sample.gt_instances.masks
        covered = np.asarray(masks).any(axis=0)
        # A class has one colour; the scores are written over the right half only.
        assert (left == right).all(axis=-1)[covered].mean() > 0.6
        for half in (left, right):
            changed = (half != image).any(axis=-1)
            assert changed[covered].mean() > 0.9
            assert changed[~covered].mean() < 0.5
        # Boxes and masks are at home in the same image: each box is its mask's extent.
        for box, mask in zip(sample.gt_instances.bboxes.tolist(), np.asarray(masks), strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            extent = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert box == pytest.approx(extent, abs=1e-3)


def test_the_detectors_own_predictions_are_drawn(config, checkpoint, tmp_path):
    """All images where there are fewer; a high threshold leaves the right half untouched."""
    files = draw_predictions(config, checkpoint, tmp_path, num_images=9, score_thr=1.0)
    assert len(files) == 5
    untouched = np.asarray(Image.open(files[0]))[:, 480:]
    source = Path(config.test_dataloader.dataset.data_root) / 'val' / files[0].name
    expected = np.asarray(Image.open(source)).repeat(5, axis=0).repeat(5, axis=1)
    assert np.array_equal(untouched, expected)


@pytest.fixture(scope='module')
def street(tmp_path_factory) -> tuple[Config, Path]:
    """The CamVid config with a tiny model on two images, whose left half is not labelled."""
    root = tmp_path_factory.mktemp('street')
    for folder in ('img_dir/val', 'ann_dir/val'):
        (root / folder).mkdir(parents=True)
    for name in 'ab':
        label = np.full((50, 70), 255, np.uint8)
        label[:, 35:] = 3
        Image.fromarray(label).save(root / f'ann_dir/val/{name}.png')
        Image.fromarray(np.full((50, 70, 3), 128, np.uint8)).save(root / f'img_dir/val/{name}.jpg')
    cfg = Config.fromfile(CONFIGS / 'upernet_vittt_t_camvid.py')
    cfg.model.backbone.conv_inplane = 8
    cfg.model.backbone.norm_cfg = dict(type='BN')
    cfg.model.backbone.backbone.arch = dict(
        embed_dims=32, num_layers=4, num_heads=1, feedforward_channels=32
    )
    cfg.model.decode_head.update(in_channels=[32] * 4, channels=64)
    cfg.model.auxiliary_head.update(in_channels=32, channels=64)
    cfg.test_dataloader.dataset.data_root = str(root)
    init_default_scope('mmseg')
    model = ROOT.build(cfg.model)
    # Whatever it sees: class 3.
    torch.nn.init.zeros_(model.decode_head.conv_seg.weight)
    model.decode_head.conv_seg.bias.data = 10.0 * torch.eye(11)[3]
    path = root / 'w.pth'
    torch.save(dict(state_dict=model.state_dict()), path)
    return cfg, path


def test_label_maps_have_one_palette(street, tmp_path, capsys):
    files = draw_predictions(*street, tmp_path / 'out')
    assert [f.name for f in files] == ['a.png', 'b.png']
    picture = np.asarray(Image.open(files[0]))
    # 50 × 70 pixels, ten times as large.
    assert picture.shape == (500, 1400, 3)
    left, right = picture[400, :700], picture[400, 700:]
    assert np.array_equal(left[350:], right[350:])
    assert np.ptp(right, axis=0).max() == 0
    # 255 has no colour, and is darkened.
    assert left[:350].max() < 128 < left[350:].max()
    assert 'drawing' in capsys.readouterr().err


def test_images_with_one_name_have_a_picture_each(street, tmp_path):
    config, checkpoint = copy.deepcopy(street[0]), street[1]
    root = Path(config.test_dataloader.dataset.data_root)
    for folder, name in (('img_dir', 'a.jpg'), ('ann_dir', 'a.png')):
        for city in ('north', 'south'):
            (tmp_path / folder / 'val' / city).mkdir(parents=True)
            shutil.copy(root / folder / 'val' / name, tmp_path / folder / 'val' / city)
    config.test_dataloader.dataset.data_root = str(tmp_path)
    files = draw_predictions(config, checkpoint, tmp_path / 'out')
    assert [f.name for f in files] == ['a.png', 'a_1.png']
    assert all(f.is_file() for f in files)


@pytest.mark.parametrize('of', ['digits', 'street'])
def test_a_set_without_labels_shows_predictions(of, street, config, checkpoint, tmp_path):
    cfg, weights = street if of == 'street' else (config, checkpoint)
    cfg = copy.deepcopy(cfg)
    pipeline = cfg.test_dataloader.dataset.pipeline
    cfg.test_dataloader.dataset.pipeline = [
        step for step in pipeline if step.type != 'LoadAnnotations'
    ]
    (file,) = draw_predictions(cfg, weights, tmp_path, num_images=1)
    # One image, and nothing beside it.
    shape = (500, 700, 3) if of == 'street' else (480, 480, 3)
    assert np.asarray(Image.open(file)).shape == shape


def test_a_grid_has_the_first_images(street, config, checkpoint, tmp_path):
    files = draw_predictions(config, checkpoint, tmp_path, num_images=3, first=True)
    assert [f.name for f in files] == ['000000.png', '000001.png', '000002.png']
    files += draw_predictions(*street, tmp_path, num_images=1, first=True)
    sheet = np.asarray(Image.open(tile(files, tmp_path / 'new' / 'grid.png')))
    # Two in a row, 960 × 480 and 1400 × 500 made 640 wide, and 8 pixels between them.
    assert sheet.shape == (320 + 8 + 320, 640 + 8 + 640, 3)
    assert (sheet[:, 640:648] == 255).all()
    assert (sheet[320:328] == 255).all()
    for i, file in enumerate(files):
        top, left = 328 * (i // 2), 648 * (i % 2)
        with Image.open(file) as image:
            small = np.asarray(image.resize((640, 320 if i < 3 else 229), Image.Resampling.BOX))
        found = sheet[top : top + len(small), left : left + 640]
        assert np.abs(found.astype(int) - small).mean() < 3
    assert tile(files[:1], tmp_path / 'one.png').stat().st_size


def test_classifiers_are_refused(checkpoint, tmp_path):
    config = Config.fromfile(CONFIGS / 'vittt_t_in1k.py')
    with pytest.raises(UsageError, match=r"'mmpretrain': predictions are drawn of mmdet and mmseg"):
        draw_predictions(config, checkpoint, tmp_path)


def test_a_checkpoint_of_another_model_is_refused(config, tmp_path):
    path = tmp_path / 'other.pth'
    torch.save(dict(state_dict=torch.nn.Linear(2, 2).state_dict()), path)
    with pytest.raises(RuntimeError, match='unexpected key in source state_dict: weight, bias'):
        draw_predictions(config, path, tmp_path)


def test_num_images_below_one_is_named(config, checkpoint, tmp_path):
    with pytest.raises(ValueError, match='num_images=0: pass 1 or more'):
        draw_predictions(config, checkpoint, tmp_path, num_images=0)
