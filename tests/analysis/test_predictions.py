"""Pictures of predictions, of boxes and of label maps: ground truth left, predictions right."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from torch import nn

from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis import predictions
from mmvttt.openmmlab.analysis.predictions import draw_predictions, tile
from mmvttt.openmmlab.datasets import make_digits

from ..configs.reduced import build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def saved(model: nn.Module, folder: Path) -> Path:
    torch.save(dict(state_dict=model.state_dict()), folder / 'epoch_1.pth')
    return folder / 'epoch_1.pth'


@pytest.fixture(scope='module')
def digits(tmp_path_factory) -> tuple[Config, Path]:
    """The demo's detector, smaller still, on five images of its own, and its weights."""
    folder = tmp_path_factory.mktemp('digits')
    cfg = reduce_model(Config.fromfile(CONFIGS / 'maskrcnn_vittt_demo.py'))
    cfg.test_dataloader.dataset.data_root = str(make_digits(folder / 'set', 1, 5, 96))
    # Another size than the files': annotations and predictions must come back to theirs.
    cfg.test_dataloader.dataset.pipeline[1].scale = (64, 64)
    return cfg, saved(build(cfg), folder)


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
    cfg = reduce_model(Config.fromfile(CONFIGS / 'upernet_vittt_t_camvid.py'))
    cfg.test_dataloader.dataset.data_root = str(root)
    model = build(cfg)
    # Whatever it sees: class 3.
    nn.init.zeros_(model.decode_head.conv_seg.weight)
    model.decode_head.conv_seg.bias.data = 10.0 * torch.eye(11)[3]
    return cfg, saved(model, root)


def test_pictures_hold_ground_truth_and_predictions(digits, tmp_path, monkeypatch):
    drawn = []
    draw = predictions.draw_instances
    monkeypatch.setattr(predictions, 'draw_instances', lambda *a: drawn.append(a) or draw(*a))
    files = draw_predictions(*digits, tmp_path / 'out', num_images=3, score_thr=0.0)
    # Evenly spread over the five images, the first and the last among them.
    assert [f.name for f in files] == ['000000.png', '000002.png', '000004.png']
    assert sorted((tmp_path / 'out').iterdir()) == files
    for file, truth, predicted in zip(files, drawn[::2], drawn[1::2], strict=True):
        # 96 pixels, five times as large, below the bars with titles.
        picture = np.asarray(Image.open(file))
        assert (picture.shape[1], 480 < len(picture) < 520) == (960, True)
        _, boxes, labels, names, scores, masks, _ = truth
        assert scores is None
        assert len(names) == 10
        assert len(boxes) == len(labels) == len(masks) > 0
        # Boxes and masks belong to the same enlarged image: each box is its mask's extent.
        for box, mask in zip(boxes.tolist(), masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            extent = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert box == pytest.approx(extent, abs=5)
        assert np.array_equal(picture[-480:, :480], draw(*truth))
        assert np.array_equal(picture[-480:, 480:], draw(*predicted))
        assert len(predicted[4]) > 0


def test_a_high_threshold_leaves_the_image_as_it_is(digits, tmp_path):
    """All images where there are fewer."""
    files = draw_predictions(*digits, tmp_path, num_images=9, score_thr=1.0)
    assert len(files) == 5
    untouched = np.asarray(Image.open(files[0]))[-480:, 480:]
    source = Path(digits[0].test_dataloader.dataset.data_root) / 'val' / files[0].name
    expected = np.asarray(Image.open(source)).repeat(5, axis=0).repeat(5, axis=1)
    assert np.array_equal(untouched, expected)


def test_label_maps_have_one_palette(street, tmp_path, capsys):
    files = draw_predictions(*street, tmp_path / 'out')
    assert [f.name for f in files] == ['a.png', 'b.png']
    picture = np.asarray(Image.open(files[0]))
    # 50 × 70 pixels, ten times as large, and a title and a legend.
    assert picture.shape[1] == 1400
    left, right = picture[400, :700], picture[400, 700:]
    assert np.array_equal(left[350:], right[350:])
    assert np.ptp(right, axis=0).max() == 0
    # 255 has no colour, and is darkened.
    assert left[:350].max() < 50 < left[350:].max()
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


@pytest.mark.parametrize(('kind', 'width'), [('digits', 480), ('street', 700)])
def test_a_set_without_labels_shows_predictions(kind, width, request, tmp_path):
    cfg, weights = copy.deepcopy(request.getfixturevalue(kind))
    dataset = cfg.test_dataloader.dataset
    dataset.pipeline = [step for step in dataset.pipeline if step.type != 'LoadAnnotations']
    (file,) = draw_predictions(cfg, weights, tmp_path, num_images=1)
    # One image, and nothing beside it.
    assert np.asarray(Image.open(file)).shape[1] == width


def test_a_grid_has_the_first_images(digits, street, tmp_path):
    files = draw_predictions(*digits, tmp_path, num_images=3, first=True)
    assert [f.name for f in files] == ['000000.png', '000001.png', '000002.png']
    files += draw_predictions(*street, tmp_path, num_images=1, first=True)
    sheet = np.asarray(Image.open(tile(files, tmp_path / 'new' / 'grid.png')))
    # Two in a row, each 640 wide, and 8 pixels around them.
    with Image.open(files[2]) as image:
        height = round(640 * image.height / image.width)
        small = np.asarray(image.resize((640, height), Image.Resampling.BOX))
    assert sheet.shape == (8 + height + 8 + height + 8, 8 + 640 + 8 + 640 + 8, 3)
    assert np.abs(sheet[-8 - height : -8, 8:648].astype(int) - small).mean() < 3
    assert tile(files[:1], tmp_path / 'one.png').stat().st_size


def test_what_cannot_be_drawn_is_named(digits, tmp_path):
    config, checkpoint = digits
    classifier = Config.fromfile(CONFIGS / 'vittt_t_in1k.py')
    with pytest.raises(UsageError, match=r"'mmpretrain': predictions are drawn of mmdet and mmseg"):
        draw_predictions(classifier, checkpoint, tmp_path)
    path = saved(nn.Linear(2, 2), tmp_path)
    with pytest.raises(RuntimeError, match='unexpected key in source state_dict: weight, bias'):
        draw_predictions(config, path, tmp_path)
