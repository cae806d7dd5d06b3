"""Photographs through a model of each toolbox, and its data set, drawn by its own visualizer."""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np
import pytest
import torch
from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.structures import InstanceData
from PIL import Image
from pycocotools.coco import COCO

import mmvttt
from mmvttt.errors import CheckpointMismatchError, DataError, UsageError
from mmvttt.openmmlab.apis.predict import drawings, find_images, predict_files
from mmvttt.openmmlab.apis.predictor import Predictor, _twin, open_model
from mmvttt.openmmlab.config import config_root
from mmvttt.openmmlab.tasks import lettering, task_for
from mmvttt.openmmlab.tasks.lettering import font_for
from mmvttt.openmmlab.tasks.prediction import Classes, Prediction

from ..configs.reduced import build, reduce_model, reduced, save_random


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
    cfg = reduced(name)
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


@pytest.fixture(scope='module')
def detector(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A config and a checkpoint of a detector of people."""
    folder = tmp_path_factory.mktemp('detector')
    cfg = small('maskrcnn_vittt_t_pennfudan')
    cfg.dump(folder / 'small.py')
    save_random(cfg, folder / 'w.pth', ('person',))
    return folder / 'small.py', folder / 'w.pth'


def is_picture(prediction: Prediction, path: Path) -> bool:
    prediction.save(path)
    return cv2.imread(str(path)) is not None


@pytest.mark.parametrize(('make', 'classes'), [(small, 11), (binary, 2)], ids=['', 'binary'])
def test_a_segmentor_draws_a_label_map(
    make: Callable, classes: int, image: Path, tmp_path: Path
) -> None:
    cfg = make('upernet_vittt_t_camvid')
    names = [f'kind-{i}' for i in range(classes)]
    save_random(cfg, tmp_path / 'w.pth', names)
    prediction = open_model(cfg, 'w.pth').predict(image)
    assert is_picture(prediction, tmp_path / 'out.png')
    assert prediction.labels.shape == (48, 64)
    rows = prediction.rows()
    assert {row['label'] for row in rows} <= set(names)
    assert sum(row['share'] for row in rows) == pytest.approx(1)


def test_a_classifier_names_the_five_likeliest(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmpretrain.utils import progress

    # Left open, or nested in another, it has rich recurse in every later bar of the process.
    monkeypatch.setattr(progress.global_live, 'start', lambda: pytest.fail('a second bar'))
    cfg = small('vittt_t_in1k')
    save_random(cfg, tmp_path / 'w.pth', [f'kind-{i}' for i in range(7)])
    prediction = open_model(cfg, 'w.pth').predict(image)
    assert is_picture(prediction, tmp_path / 'out.png')
    assert prediction.scores.sum() == pytest.approx(1, abs=1e-5)
    scores = {row['label']: row['score'] for row in prediction.rows()}
    assert len(scores) == 5
    assert [*scores.values()] == sorted(scores.values(), reverse=True)


def test_a_detector_s_boxes_for_a_file_an_image_and_pixels(
    image: Path, detector: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = mmvttt.load(*detector, device='cpu')
    prediction = predictor.predict(image, score_thr=0.05)
    assert is_picture(prediction, tmp_path / 'out.png')
    # An untrained head gives 0.5 for each of two classes.
    assert {row['label'] for row in prediction.rows()} == {'person'}
    assert predictor.predict(image, score_thr=0.99).rows() == []
    opened = Image.open(image).convert('RGB')
    # A PNG, since OpenCV and Pillow decode a JPEG a little differently.
    opened.save(image := tmp_path / 'a.png')
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
    dark, thin = Image.fromarray(np.zeros((4, 4), np.uint16)), np.zeros((1, 9999, 3), np.uint8)
    for wrong in (np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), 7, dark, thin):
        with pytest.raises(UsageError):
            predictor.predict(wrong)
    for score in (-0.1, 1.5):
        with pytest.raises(UsageError):
            predictor.predict(image, score)
    monkeypatch.setattr('mmcv.imfrombytes', lambda *_, **__: None)
    with pytest.raises(UsageError, match='OpenCV'):
        predictor.predict(image)


def test_a_transform_of_one_s_own_stays_whatever_its_name() -> None:
    class LoadNothing(BaseTransform):
        def transform(self, results: dict) -> dict:
            return dict(results, seen=True)

    steps = [dict(type='LoadImageFromFile'), dict(type=LoadNothing), dict(type='LoadAnnotations')]
    predictor = Predictor(torch.nn.Identity(), task_for('boxes'), steps, dict(classes=('a',)))
    assert [type(step) for step in predictor.pipeline.transforms] == [LoadNothing]


def prediction() -> Prediction:
    image = np.full((60, 80, 3), 90, np.uint8)
    boxes = np.array([[10.0, 20, 30, 50], [40, 5, 70, 50], [0, 0, 9, 9]])
    masks = np.zeros((3, 60, 80), bool)
    masks[0, 25:40, 12:28] = True
    scores, labels = np.array([0.991, 0.97, 0.5]), np.array([0, 0, 1])
    return Prediction(image, ['person', 'bus'], scores, labels, boxes, masks)


def test_a_prediction_is_words_a_picture_and_arrays_of_supervision() -> None:
    found = prediction()
    assert repr(found) == '2 persons: .99, .97; 1 bus: .50'
    drawn = found.draw()
    assert (drawn[30, 20] != found.image[30, 20]).all()
    assert (drawn[55, 35] == found.image[55, 35]).all()
    # Outlines, each class in a colour of its own.
    assert (drawn[50, 30] == drawn[50, 70]).all()
    assert (drawn[50, 30] != drawn[9, 9]).any()
    supervision = pytest.importorskip('supervision')
    detections = found.to_supervision()
    assert (detections.xyxy == found.boxes).all()
    assert detections.class_id.tolist() == [0, 0, 1]
    assert detections.data['class_name'].tolist() == ['person', 'person', 'bus']
    assert detections.mask.sum() == 15 * 16
    labels = np.array([[0, 0], [0, 1]])
    maps = Prediction(np.zeros((2, 2, 3), np.uint8), ['a', 'b'], labels=labels)
    assert repr(maps) == 'a 75.0%; b 25.0%'
    assert (
        maps.to_supervision().mask.tolist() == (np.array([0, 1])[:, None, None] == labels).tolist()
    )
    scores = Prediction(maps.image, ['a', 'b'], np.array([0.2, 0.8], np.float32))
    assert repr(scores) == 'b 0.800; a 0.200'
    assert isinstance(scores.to_supervision(), supervision.Classifications)


@pytest.mark.parametrize(
    'palette',
    ['random', [(300, 0, 0)] * 2, [(-1, 0, 0)] * 2, [(1, 2)] * 2, [None] * 2, [(1.5, 0, 0)] * 2],
)
def test_colours_that_are_none_are_not_drawn(palette: Any) -> None:
    scores = Prediction(np.zeros((9, 9, 3), np.uint8), ['a', 'b'], np.ones(2), palette=palette)
    assert scores.colours().tolist() == replace(scores, palette=None).colours().tolist()
    assert replace(scores, palette=[[1, 2, 3]] * 2).colours().tolist() == [[1, 2, 3]] * 2


def test_names_in_any_script_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(name: str) -> bytes:
        return replace(prediction(), classes=[name, name]).draw().tobytes()

    pairs = ('кошка', 'лошадь'), ('γάτα', 'φώκα'), ('行人', '汽车')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert all(drawn(a) != drawn(b) for a, b in pairs)
    # Letters that no font has.
    monkeypatch.setattr(lettering, '_files', list)
    with pytest.warns(UserWarning, match='Noto'):
        assert font_for('a行x', 12)[0] == 'a<884C>x'


@pytest.mark.parametrize('name', ['cat\x1b]0;title\x07', 'dog\nerror: x', 'c1\x9b2J', '\u202egnp'])
def test_a_name_from_outside_is_shown_on_one_line(name: str) -> None:
    for kind in (prediction(), Classes(np.zeros((40, 60, 3), np.uint8), 'ab', np.ones(2))):
        strange = replace(kind, classes=[name, name])
        assert strange.draw().any()
        assert repr(strange).isprintable()


def test_a_table_has_its_columns_and_a_row_for_each_image(tmp_path: Path) -> None:
    empty = replace(
        prediction(),
        scores=np.zeros(0),
        labels=np.zeros(0, int),
        boxes=np.zeros((0, 4)),
        masks=None,
    )
    pairs = [(Path(f'{x}.jpg'), tmp_path / f'{x}.png') for x in 'ab']
    list(predict_files(Seen(empty, empty), pairs, save=tmp_path / 'a.csv'))
    lines = (tmp_path / 'a.csv').read_text().splitlines()
    assert lines == ['image,label,score,x1,y1,x2,y2', 'a.jpg,,,,,,', 'b.jpg,,,,,,']
    # Masks of one image do not make masks of another.
    list(predict_files(Seen(prediction(), empty), pairs, save=tmp_path / 'a.json'))
    annotations = json.loads((tmp_path / 'a.json').read_text())['annotations']
    assert [entry['image_id'] for entry in annotations] == [1, 1, 1]


def write_video(path: Path, frames: int) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*'mp4v'), 5, (80, 60))
    for _ in range(frames):
        writer.write(np.zeros((60, 80, 3), np.uint8))
    writer.release()


def test_a_video_that_is_not_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / 'a.mp4', 1)
    pairs = [(tmp_path / 'a.mp4', tmp_path / 'out' / 'a.mp4')]
    monkeypatch.setattr(cv2.VideoWriter, 'isOpened', lambda _: False)
    with pytest.raises(UsageError, match='encoder'):
        list(predict_files(Seen(), pairs))


def test_without_supervision_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'supervision', None)
    with pytest.raises(ModuleNotFoundError, match=r'mmvttt\[predict\]'):
        prediction().to_supervision()


class Seen:
    """Predicts what it is given, then the same for each image."""

    classes = ('person', 'bus')
    task = task_for('boxes')

    def __init__(self, *seen: Prediction) -> None:
        self.seen = list(seen)

    def predict(self, image: object, score_thr: float, tiles: int | None) -> Prediction:
        return prediction()

    def stream(self, images: Iterable, *options: object) -> Iterator[Prediction]:
        return (self.seen.pop(0) if self.seen else prediction() for _ in images)


def test_folders_patterns_and_videos_become_pictures_and_tables(
    image: Path, tmp_path: Path
) -> None:
    (folder := tmp_path / 'photos').mkdir()
    for name in ('b.jpg', 'a', 'notes.txt'):
        (folder / name).write_bytes(image.read_bytes())
    write_video(folder / 'c.mp4', 3)
    files = find_images([folder, folder / '*.jpg', folder / 'a'])
    assert [f.name for f in files] == ['b.jpg', 'c.mp4', 'b.jpg', 'a']
    pairs = drawings(files[1:], tmp_path / 'out')
    rows = list(predict_files(Seen(), pairs, save=tmp_path / 'all.json'))
    assert [(f.name, drawing.name) for f, _, drawing in rows] == [
        ('c.mp4', 'c.mp4'), ('b.jpg', 'b.png'), ('a', 'a.png')
    ]  # fmt: skip
    assert rows[0][1] == '3 frames'
    video = cv2.VideoCapture(str(tmp_path / 'out/c.mp4'))
    assert [video.read()[0] for _ in range(4)] == [True, True, True, False]
    assert cv2.imread(str(tmp_path / 'out/a.png')).shape == (60, 80, 3)
    coco = COCO(tmp_path / 'all.json')
    assert [len(coco.getAnnIds(i)) for i in coco.getImgIds()] == [3] * 5
    first = coco.loadAnns(coco.getAnnIds())[0]
    assert first['bbox'] == [10, 20, 20, 30]
    assert coco.annToMask(first).sum() == 15 * 16
    assert len(coco.loadRes(coco.dataset['annotations']).anns) == 15
    list(predict_files(Seen(), pairs[2:], save=tmp_path / 'all.csv'))
    with pytest.raises(UsageError), patch.object(Seen, 'task', task_for('classes')):
        next(predict_files(Seen(), pairs[2:], save=tmp_path / 'all.json'))
    lines = (tmp_path / 'all.csv').read_text().splitlines()
    assert lines[0] == 'image,label,score,x1,y1,x2,y2'
    assert lines[3].endswith('a,bus,0.5,0.0,0.0,9.0,9.0')
    for wrong in ([tmp_path / 'empty'], [folder / '*.png'], [folder / 'notes.mp4']):
        (tmp_path / 'empty').mkdir(exist_ok=True)
        (folder / 'notes.mp4').write_text('no video')
        with pytest.raises((UsageError, DataError)):
            find_images(wrong)


def test_a_stream_is_in_order_and_reads_as_it_goes(detector: tuple, tmp_path: Path) -> None:
    predictor = mmvttt.load(*detector, device='cpu')
    rng = np.random.default_rng(0)
    sizes = [(48, 64), (48, 64), (48, 64), (64, 48), (48, 64)]
    photos = [rng.integers(0, 255, (*size, 3), np.uint8) for size in sizes]
    read: list[int] = []

    def reading() -> Iterator[np.ndarray]:
        for i in range(50):
            read.append(i)
            yield photos[i % 5]

    stream = predictor.stream(reading(), 0.05, batch=2)
    for photo, prediction in zip(photos, stream, strict=False):
        alone = predictor.predict(photo, 0.05)
        assert prediction.image.shape == photo.shape
        assert len(prediction.boxes) == len(alone.boxes) > 0
        np.testing.assert_allclose(prediction.boxes, alone.boxes, atol=1e-2)
    assert len(read) < 15
    # What comes before an image that cannot be read is there.
    broken = predictor.stream([photos[0], tmp_path / 'none.png'], 0.05, batch=4)
    assert len(next(broken).boxes)
    with pytest.raises(DataError):
        next(broken)


def test_a_model_that_runs_beside_another_shares_its_tensors_only(detector: tuple) -> None:
    """Some heads keep something in a call."""
    model = mmvttt.load(*detector, device='cpu').model
    twin = _twin(model)
    tensors = [[*m.parameters(), *m.buffers()] for m in (model, twin)]
    assert len(tensors[0]) > 99
    assert all(one is other for one, other in zip(*tensors, strict=True))
    assert not {*map(id, model.modules())} & {*map(id, twin.modules())}


@pytest.mark.parametrize('channels', [1, 3])
def test_tiles_overlap_and_their_best_boxes_stay(channels: int) -> None:
    """A detector of bright pixels, whose score is their share of its picture."""

    class Bright(torch.nn.Module):
        def test_step(self, data: dict) -> list[Any]:
            (image,) = data['inputs']
            assert image.shape[0] == channels
            samples: list[Any] = []
            places = (image[0] > 100).nonzero()
            count = int(len(places) > 0)
            boxes, scores = torch.zeros(count, 4), torch.zeros(count)
            if count:
                low, high = places.amin(0).flip(0), places.amax(0).flip(0) + 1
                boxes[0] = torch.cat([low, high])
                # The whole object scores best.
                scores[0] = (high - low).prod() / 400
            instances = InstanceData(
                bboxes=boxes,
                scores=scores,
                labels=torch.zeros(count, dtype=torch.long),
                masks=np.asarray(image[:count] > 100),
            )
            samples.append(SimpleNamespace(pred_instances=instances))
            samples[0].cpu = lambda: samples[0]
            return samples

    bright = Bright()
    bright.first = torch.nn.Conv2d(channels, 1, 1)
    predictor = Predictor(bright, task_for('boxes'), [], dict(classes=('light',)))
    predictor.pipeline = lambda results: dict(
        inputs=torch.from_numpy(results['img']).permute(2, 0, 1)
    )
    # 30×11 across the seam of tiles of 50, cut by the first and whole in the second.
    image = np.zeros((60, 120, channels), np.uint8)
    image[20:31, 42:60] = 200
    image = image[..., 0] if channels == 1 else image
    prediction = predictor.predict(image, 0.0, tiles=50)
    assert prediction.boxes[0].tolist() == [42, 20, 60, 31]
    assert (np.diff(prediction.scores) <= 0).all()
    assert prediction.masks[0].sum() == 18 * 11
    assert prediction.masks[0][20:31, 42:60].all()
    assert prediction.draw().shape == (60, 120, 3)
    # The whole and its equal from a tile below are one.
    assert len(prediction.boxes) <= 2


@pytest.mark.parametrize('channels', [1, 4])
def test_a_model_of_other_channels(channels: int, tmp_path: Path) -> None:
    """Files are read as the test pipeline reads them; arrays have the model's channels."""
    cfg = Config.fromfile(config_root() / 'maskrcnn_vittt_t_pennfudan.py')
    cfg.model.backbone.backbone.in_channels = channels
    # mmengine takes one mean for all channels, or three.
    cfg.model.data_preprocessor.update(mean=[114.0], std=[58.0], bgr_to_rgb=False)
    reader = cfg.test_dataloader.dataset.pipeline[0]
    reader.color_type = 'grayscale' if channels == 1 else 'unchanged'
    cfg = reduce_model(cfg)
    save_random(cfg, tmp_path / 'w.pth', ('person',))
    predictor = open_model(cfg, 'w.pth')
    shape = (48, 64) if channels == 1 else (48, 64, channels)
    pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    cv2.imwrite(str(tmp_path / 'a.png'), pixels)
    by_file, by_array = predictor.predict([tmp_path / 'a.png', pixels], 0.05)
    assert len(by_file.boxes)
    np.testing.assert_allclose(by_file.boxes, by_array.boxes, atol=1e-3)
    assert by_file.draw().shape == (48, 64, 3)
    with pytest.raises(UsageError):
        predictor.predict(np.zeros((48, 64, 3), np.uint8))


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(UsageError):
        mmvttt.load('maskrcnn_vittt_s_1x')
    for config in (dict(default_scope='mmengine'), dict(default_scope='mmdet', model=dict())):
        with pytest.raises(UsageError):
            open_model(Config(config), 'w.pth')


def test_no_image_is_written_over(image: Path, tmp_path: Path, tools: Any) -> None:
    other, mine = tmp_path / 'a' / '0.jpg', tmp_path / 'out' / 'vis' / '0.png'
    for path in (other, mine):
        path.parent.mkdir(parents=True)
        path.write_bytes(image.read_bytes())
    with pytest.raises(UsageError):
        drawings([mine], mine.parent)
    with pytest.raises(UsageError):
        drawings([image, other], tmp_path / 'out')
    assert mine.read_bytes() == image.read_bytes()
    said = tools.error('image_demo.py', 'pedestrians', image, '--save', tmp_path / 'a.txt')
    assert 'ends in .csv or .json' in said


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
    with pytest.raises(CheckpointMismatchError):
        open_model(cfg, tmp_path / 'weights.pth')
