"""Pictures of predictions, of boxes and of label maps: ground truth left, predictions right."""

import copy
import re
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


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are written."""
    drawn, save = [], predictions.save
    monkeypatch.setattr(predictions, 'save', lambda f, *a, **k: drawn.append(f) or save(f, *a, **k))
    return drawn


def test_pictures_hold_ground_truth_and_predictions(digits, tmp_path, figures):
    files = draw_predictions(*digits, tmp_path / 'out', num_images=3, score_thr=0.0)
    # Evenly spread over the five images, the first and the last among them.
    assert [f.name for f in files] == ['000000.png', '000002.png', '000004.png']
    assert sorted((tmp_path / 'out').iterdir()) == files
    for figure, file in zip(figures, files, strict=True):
        truth, predicted = figure.axes
        assert truth.get_title() == f'truth: {file.name}'
        assert predicted.get_title() == f'predictions of 0 or more: {file.name}'
        photo, *masks = (image.get_array() for image in truth.images)
        source = Path(digits[0].test_dataloader.dataset.data_root) / 'val' / file.name
        assert np.array_equal(photo, np.asarray(Image.open(source)))
        assert len(truth.patches) == len(truth.texts) == len(masks) > 0
        # Boxes and masks belong to the same image: each box is its mask's extent.
        for box, mask, text in zip(truth.patches, masks, truth.texts, strict=True):
            assert text.get_text() in '0123456789'
            rows, columns = (np.flatnonzero((mask[..., 3] > 0).any(axis)) for axis in (1, 0))
            extent = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert box.get_bbox().extents == pytest.approx(extent, abs=1)
        assert len(predicted.patches) > 0
        assert all(re.fullmatch(r'\d [01]\.\d\d', t.get_text()) for t in predicted.texts)


def test_a_high_threshold_leaves_the_image_as_it_is(digits, tmp_path, figures):
    """All images where there are fewer."""
    assert len(draw_predictions(*digits, tmp_path, num_images=9, score_thr=1.0)) == 5
    for figure in figures:
        untouched = figure.axes[1]
        assert len(untouched.images) == 1
        assert not [*untouched.patches, *untouched.texts]


def test_label_maps_have_one_palette(street, tmp_path, capsys, figures):
    files = draw_predictions(*street, tmp_path / 'out')
    assert [f.name for f in files] == ['a.png', 'b.png']
    left, right = (panel.images[1].get_array() for panel in figures[0].axes)
    assert left.shape == (50, 70, 4)
    assert np.array_equal(left[:, 35:], right[:, 35:])
    assert np.ptp(right, axis=(0, 1)).max() == 0
    # 255 has no colour, and is darkened.
    assert (left[:, :35] == [0, 0, 0, 0.6]).all()
    assert left[0, 35, :3].max() > 0.2
    (legend,) = figures[0].legends
    assert len(legend.get_texts()) == 1
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


@pytest.mark.parametrize('kind', ['digits', 'street'])
def test_a_set_without_labels_shows_predictions(kind, request, tmp_path, figures):
    cfg, weights = copy.deepcopy(request.getfixturevalue(kind))
    dataset = cfg.test_dataloader.dataset
    dataset.pipeline = [step for step in dataset.pipeline if step.type != 'LoadAnnotations']
    draw_predictions(cfg, weights, tmp_path, num_images=1)
    # One panel, and nothing beside it.
    assert len(figures[0].axes) == 1
    assert figures[0].axes[0].get_title().startswith('predictions')


def test_a_grid_has_the_first_images(digits, street, tmp_path):
    files = draw_predictions(*digits, tmp_path, num_images=3, first=True)
    assert [f.name for f in files] == ['000000.png', '000001.png', '000002.png']
    files += draw_predictions(*street, tmp_path, num_images=1, first=True)
    sheet = np.asarray(Image.open(tile(files, tmp_path / 'new' / 'grid.png')))
    # Two in a row, each 640 wide, and 8 pixels around them.
    with Image.open(files[2]).convert('RGB') as image:
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
