"""`mmvttt finetune`: what it says and writes; what data of each kind learns from 40 pictures."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from PIL import Image
from scipy import ndimage

import mmvttt
from mmvttt.checkpoints.published import published_file
from mmvttt.errors import DataError, ResumeError, UsageError
from mmvttt.openmmlab.apis import finetune as finetune_api
from mmvttt.openmmlab.apis.finetune import _Progress
from mmvttt.openmmlab.apis.finetune_config import BEST, LAST, read_settings
from mmvttt.openmmlab.apis.finetune_pictures import PICTURES, _labelled, _rated
from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.data.own_folder import OwnFolder
from mmvttt.openmmlab.reliability import Preempted
from mmvttt.openmmlab.tasks.prediction import Boxes, LabelMap

from ..data.sets import coco, make_coco, write
from ..public_data import public_data

BICYCLIST = 10


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that do not come with mmvttt are not to be had."""
    monkeypatch.setenv('MMVTTT_WEIGHTS', str(tmp_path))


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """A folder of ten red and ten blue pictures."""
    folder, rng = tmp_path / 'set', np.random.default_rng(0)
    for label, channel in (('red', 0), ('blue', 2)):
        (folder / label).mkdir(parents=True)
        for name in range(10):
            pixels = rng.integers(0, 60, (32, 32, 3), np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(folder / label / f'{name}.png')
    return folder


def boxes(folder: Path, count: int, objects: int) -> None:
    """Pictures with rows of boxes, in YOLO's format."""
    for kind in ('images', 'labels'):
        (folder / kind).mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = (f'0 {0.05 + 0.1 * (k % 9)} {0.1 + 0.2 * (k // 9)} .05 .1' for k in range(objects))
    text = '\n'.join(rows)
    for i in range(count):
        pixels = rng.integers(0, 256, (48, 64, 3), np.uint8)
        Image.fromarray(pixels).resize((480, 360)).save(folder / f'images/{i}.jpg')
        (folder / f'labels/{i}.txt').write_text(text)
    (folder / 'data.yaml').write_text('names: [cat]')


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends `finetune` where the training would begin."""

    def begin(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr('mmvttt.openmmlab.apis.finetune.train', begin)


def begun(folder: Path, out: Path, **options: object) -> Config:
    """The config of a training that does not begin; see `begins`."""
    with pytest.raises(KeyboardInterrupt):
        mmvttt.finetune(folder, work_dir=out, **options)
    return load_config(out / 'config.py')


def test_a_training_is_reported_and_continued(colours: Path, tmp_path: Path) -> None:
    options = dict(work_dir=tmp_path / 'out', steps=4)
    lines: list[str] = []
    model = mmvttt.finetune(colours, say=lines.append, **options)
    steps = [line.split()[1] for line in lines if line.startswith('  step ')]
    assert steps == ['1', '2', '3', '4']
    assert len(lines) <= 30
    assert model.folder == tmp_path / 'out'
    assert {'accuracy/top1'} <= {*model.metrics}
    assert [row[:2] for row in model.table] == [('blue', 2), ('red', 2)]
    assert {'best.pth', 'last.pth', *PICTURES} <= {path.name for path in model.folder.iterdir()}
    prediction = model.predict(colours / 'red' / '0.png')
    assert list(prediction.classes) == ['blue', 'red']
    # The command that it prints predicts.
    words = next(line for line in lines if line.startswith('predict ')).split()
    again = mmvttt.load(words[3], words[4], device='cpu').predict(colours / 'red' / '0.png')
    assert np.allclose(again.scores, prediction.scores, atol=1e-5)
    # The same call only reports.
    repeated: list[str] = []
    assert mmvttt.finetune(colours, say=repeated.append, **options).table == model.table
    assert not any(line.startswith('  step ') for line in repeated)
    # Another length continues, beside it, from the best weights.
    longer = mmvttt.finetune(colours, work_dir=tmp_path / 'out', steps=2)
    assert longer.folder == tmp_path / 'out_2'
    assert read_settings(longer.folder)['own']['weights'] == str(tmp_path / 'out' / 'best.pth')
    with pytest.raises(UsageError, match='starts from'):
        mmvttt.finetune(colours, 'cifar10_vit_nano', **options)
    (colours / 'red' / '0.png').replace(colours / 'blue' / 'red.png')
    # The advice has options of this command.
    with pytest.raises(ResumeError, match='--from'):
        mmvttt.finetune(colours, **options)


def test_a_training_writes_to_no_stream(
    colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, error = sys.stdout, sys.stderr
    mmvttt.finetune(colours, work_dir=tmp_path / 'out', steps=1)
    assert (sys.stdout, sys.stderr) == (out, error)
    assert 'loss' not in capfd.readouterr().out
    print_log('a later warning', 'current', logging.WARNING)
    captured = capfd.readouterr()
    assert 'a later warning' in captured.out + captured.err
    assert 'Logging error' not in captured.err


def test_what_comes_from_a_folder_is_data(colours: Path, tmp_path: Path, begins: None) -> None:
    names = ("{{$X:.*|',open('ran','w'),('}}", '{{ fileBasename }}', "dog's {{_base_.model}}")
    folder = tmp_path / "it's\nimport os\n{{$HOME:x}} \\"
    colours.rename(folder)
    (folder / 'blue').rename(folder / names[0])
    (folder / 'red').rename(folder / names[1])
    (folder / names[2]).mkdir()
    for path in list((folder / names[0]).iterdir())[:5]:
        path.rename(folder / names[2] / path.name)
    cfg = begun(folder, tmp_path / '{{ fileDirname }}', steps=1)
    assert {*cfg.train_dataloader.dataset.metainfo.classes} == {*names}
    assert cfg.train_dataloader.dataset.data_root == str(folder)
    # As a training leaves it in its work directory.
    cfg.dump('dumped.py')
    again = load_config('dumped.py')
    assert again.train_dataloader.dataset == cfg.train_dataloader.dataset
    assert not Path('ran').exists()
    text = (tmp_path / '{{ fileDirname }}' / 'config.py').read_text()
    assert len(text.splitlines()) <= 10
    assert not any(name in text for name in (*names, folder.name))


def test_a_folder_is_read_again_after_an_error(tmp_path: Path, begins: None) -> None:
    content = coco(6)
    make_coco(tmp_path / 'set', 6)
    for width, error in ((60, DataError), (64, KeyboardInterrupt)):
        for image in content['images'][:2]:
            image['width'] = width
        write(tmp_path / 'set', content)
        with pytest.raises(error):
            mmvttt.finetune(tmp_path / 'set', work_dir=tmp_path / 'out')


def test_a_config_of_former_data_trains_nothing(
    colours: Path, tmp_path: Path, begins: None
) -> None:
    out = tmp_path / 'out'
    begun(colours, out, steps=1)
    (colours / 'red').rename(colours / 'green')
    cfg = begun(colours, out, steps=1)
    assert cfg.train_dataloader.dataset.metainfo.classes == ('blue', 'green')
    # A full disk leaves a part of a file.
    for name in ('config.py', 'finetune.json'):
        text = (out / name).read_text()
        (out / name).write_text(text[: len(text) // 2])
        assert begun(colours, out, steps=1).model.head.num_classes == 2


def test_counted_objects_and_steps(tmp_path: Path, begins: None) -> None:
    boxes(tmp_path / 'set', 12, objects=36)
    cfg = begun(tmp_path / 'set', tmp_path / 'out', steps=7)
    assert cfg.train_cfg.max_iters == 7
    assert cfg.model.test_cfg.rcnn.max_per_img >= 36
    assert cfg.model.train_cfg.rcnn.sampler.num >= 4 * 36
    assert 1 <= cfg.train_cfg.val_interval < 7
    assert cfg.default_hooks.checkpoint.save_best == 'coco/bbox_mAP'


@pytest.mark.parametrize('name', ['', 'config.py', 'run/iter_1.pth'])
def test_own_weights_are_a_start(name: str, tmp_path: Path, begins: None) -> None:
    boxes(tmp_path / 'set', 10, objects=1)
    begun(tmp_path / 'set', tmp_path / 'out', steps=1)
    (tmp_path / 'out/run').mkdir()
    (tmp_path / 'out/run/iter_1.pth').touch()
    cfg = begun(tmp_path / 'set', tmp_path / 'more', start=tmp_path / 'out' / name, steps=1)
    assert cfg.load_from == str(tmp_path / 'out/run/iter_1.pth')
    assert cfg.optim_wrapper.optimizer.lr == 8e-4


def test_a_published_start_brings_its_own_settings(
    colours: Path, tmp_path: Path, begins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({'model': {}}, tmp_path / 'hvit3_t_mesa_in1k.pth')
    monkeypatch.setenv('MMVTTT_WEIGHTS', str(tmp_path))
    frozen: list[int] = []

    def measure(config: Path, enough: float) -> tuple[float, float]:
        frozen.append(load_config(config).model.backbone.frozen_stages)
        return 1.0, 2.0

    monkeypatch.setattr('mmvttt.openmmlab.apis.finetune_plan._measured', measure)
    cfg = begun(colours, tmp_path / 'out', minutes=0.01)
    assert cfg.load_from == 'mmvttt://hvit3_t_mesa_in1k'
    assert cfg.optim_wrapper.optimizer.lr == 1e-4
    # No step of a whole backbone fits, and none is tried, because it may not fit into memory.
    assert frozen == [4]
    assert cfg.model.backbone.frozen_stages == 4
    assert begun(colours, tmp_path / 'whole', minutes=600).model.backbone.frozen_stages == 0
    assert frozen == [4, 0]


def test_a_checkpoint_of_a_starts_config_is_used(tmp_path: Path, begins: None) -> None:
    boxes(tmp_path / 'set', 10, objects=2)
    published = published_file('mmvttt://maskrcnn_vittt_nano_pedestrians')
    start = 'maskrcnn_vittt_nano_pedestrians', shutil.copy(published, tmp_path)
    cfg = begun(tmp_path / 'set', tmp_path / 'out', start=start, steps=1)
    assert cfg.load_from == str(start[1])
    assert cfg.optim_wrapper.optimizer.lr == 8e-4


def test_the_best_weights_predict_although_others_are_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'run').mkdir()
    for seconds, name in enumerate(('best_mIoU_iter_2.pth', 'iter_4.pth')):
        (tmp_path / 'run' / name).write_text(name)
        os.utime(tmp_path / 'run' / name, (seconds, seconds))
    opened = []
    for name in ('draw_results', 'draw_predictions'):
        monkeypatch.setattr(finetune_api, name, lambda *_: None)
    monkeypatch.setattr(
        finetune_api, 'open_model', lambda _, path, *__: opened.append(path) or SimpleNamespace()
    )
    progress = SimpleNamespace(best={'metrics': {}}, table=[], history=[], keys=[])
    for _ in range(2):
        finetune_api._finished(tmp_path, Config(), progress)
        assert (tmp_path / BEST).read_text() == 'best_mIoU_iter_2.pth'
        assert (tmp_path / LAST).read_text() == 'iter_4.pth'
    assert opened == [tmp_path / BEST] * 2


def test_less_time_than_usual_takes_the_usual_steps_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('mmvttt.openmmlab.apis.finetune_plan._estimated', lambda *_: (0.001, 1.0))
    boxes(tmp_path / 'set', 10, objects=2)
    usual, short, long = (
        mmvttt.plan(tmp_path / 'set', minutes=minutes)['steps'] for minutes in (10, 1, 20)
    )
    assert usual == short > 10
    assert long == 2 * usual


def test_a_plan_is_json(tmp_path: Path) -> None:
    boxes(tmp_path / 'set', 10, objects=2)
    lines: list[str] = []
    plan = mmvttt.plan(tmp_path / 'set', minutes=1, say=lines.append)
    assert json.loads(json.dumps(plan)) == plan
    assert plan['start'] == 'mmvttt://maskrcnn_vittt_nano_pedestrians'
    assert plan['steps'] > 0
    assert plan['memory'] > 0
    assert plan['minutes'] <= 1.5
    assert len(plan['pictures']) == 10
    assert any('would be the better start' in line for line in lines)


def test_a_plan_needs_neither_a_model_nor_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('MMVTTT_WEIGHTS')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    for name in ('published_file', 'load_config', '_measured', 'write_config'):
        monkeypatch.setattr(f'mmvttt.openmmlab.apis.finetune_plan.{name}', None)
    boxes(tmp_path / 'set', 10, objects=2)
    lines: list[str] = []
    plan = mmvttt.plan(tmp_path / 'set', minutes=5, say=lines.append)
    assert plan['estimated']
    assert plan['start'] == 'mmvttt://maskrcnn_hvit3_t_3x'
    assert 0 < plan['minutes'] < 7
    assert any('downloads mmvttt://maskrcnn_hvit3_t_3x' in line for line in lines)


def test_a_detector_that_finds_nothing_yet_goes_on(tmp_path: Path) -> None:
    """mmdetection's metric is an empty dict then."""
    data, lines = OwnFolder(tmp_path, task='boxes', classes=('cat',)), list[str]()
    progress, runner = _Progress(tmp_path / 'history', data, lines.append), SimpleNamespace()
    runner.iter, runner.max_iters = 0, 3
    progress.before_train(runner)
    for runner.iter, metrics in ((1, {}), (2, {'coco/bbox_mAP': 0.0}), (3, {'coco/bbox_mAP': 0.1})):
        progress.after_val_epoch(runner, metrics)
    assert 'bbox_mAP 0.000' in lines[1]
    assert '(best 0.000, step 1)' in lines[2]
    assert progress.best['step'] == 3


def test_ratings_of_predictions() -> None:
    image, names = np.zeros((4, 4, 3), np.uint8), ['a', 'b']
    corners = np.array([[0, 0, 2, 2], [2, 2, 4, 4.0]])
    label = Boxes(image, names, np.ones(2), np.array([0, 1]), corners)
    seen = Boxes(image, names, np.ones(2), np.array([0, 0]), corners)
    assert _rated(label, seen, 2)[0] == 0.5
    numbers = np.array([[0, 1], [2, 1]])
    rating, matrix = _rated(LabelMap(image, names, numbers), LabelMap(image, names, numbers * 0), 2)
    assert rating == pytest.approx(1 / 3)
    assert matrix.tolist() == [[1, 0], [2, 0]]


@pytest.mark.parametrize('palette', [None, [[1, 2, 3], [4, 5, 6]]])
def test_labels_have_the_colours_of_predictions(palette: object) -> None:
    numbers = torch.tensor([[[0, 1], [255, 1]]])
    labels = SegDataSample(gt_sem_seg=PixelData(data=numbers))
    sample = dict(inputs=torch.zeros(3, 2, 2), data_samples=labels)
    image, classes = np.zeros((2, 2, 3), np.uint8), ['a', 'b']
    seen = LabelMap(image, classes, numbers[0].numpy() % 2, palette=palette)
    label = _labelled(sample, classes, seen)
    assert label.colours().tolist() == [*seen.colours().tolist(), [128] * 3]
    assert label.labels.tolist() == [[0, 1], [2, 1]]


def test_ctrl_c_ends_with_one_line(tools: Any) -> None:
    def stopped(**options: object) -> None:
        # As a training that has saved itself.
        raise Preempted(0)

    tools.patch.setattr(mmvttt, 'finetune', stopped)
    said = tools.error('finetune.py', 'photos', status=130)
    assert said == 'stopped; the same command resumes it\n'


def test_a_printed_plan_is_json_without_control_characters(tools: Any) -> None:
    plan = dict(classes=['größe', '\x9b2J\x1b]0;\U000e0001'], pictures=0)
    tools.patch.setattr(mmvttt, 'plan', lambda **_: {**plan, 'pictures': []})
    printed = tools('finetune.py', 'photos', '--plan')
    assert json.loads(printed) == plan
    assert 'größe' in printed
    assert printed.replace('\n', '').isprintable()


def scenes(part: str) -> list[tuple[Path, np.ndarray]]:
    """Pictures of CamVid with their labels."""
    folder = public_data('camvid')
    return [
        (path, np.asarray(Image.open(folder / 'ann_dir' / part / f'{path.stem}.png')))
        for path in sorted((folder / 'img_dir' / part).glob('*.jpg'))
    ]


def bicyclists(folder: Path, masks: bool) -> None:
    """YOLO's boxes, or polygons around the boxes, of a class that no weights have seen."""
    number = 0
    for path, labels in scenes('val'):
        parts, _ = ndimage.label(labels == BICYCLIST, np.ones((3, 3)))
        lines = []
        for value, (rows, columns) in enumerate(ndimage.find_objects(parts), 1):
            if (parts == value).sum() >= 400:
                top, bottom = rows.start / 360, rows.stop / 360
                left, right = columns.start / 480, columns.stop / 480
                numbers = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
                if masks:
                    numbers = left, top, right, top, right, bottom, left, bottom
                lines.append(f'0 {" ".join(map(str, numbers))}')
        if lines:
            part = folder / ('valid' if number >= 36 else 'train')
            for kind in ('images', 'labels'):
                (part / kind).mkdir(parents=True, exist_ok=True)
            (part / 'images' / path.name).symlink_to(path)
            (part / 'labels' / f'{path.stem}.txt').write_text('\n'.join(lines))
            number += 1
    (folder / 'data.yaml').write_text('names: [bicyclist]')


def patches(folder: Path) -> None:
    """Patches of four classes, 40 of each to train.

    With buildings in place of the sky nothing passes 87 %, not even a linear probe of the backbone:
    those of the other street look like cars to it.
    """
    rng = np.random.default_rng(0)
    for part, count in (('train', 40), ('val', 15)):
        pairs = scenes(part)
        for name, value in dict(sky=0, road=3, tree=5, car=8).items():
            (folder / part / name).mkdir(parents=True)
            while len(list((folder / part / name).iterdir())) < count:
                path, labels = pairs[rng.integers(len(pairs))]
                y, x = rng.integers(360 - 48), rng.integers(480 - 48)
                if (labels[y : y + 48, x : x + 48] == value).mean() > 0.7:
                    patch = Image.open(path).crop((x, y, x + 48, y + 48))
                    patch.save(folder / part / name / f'{path.stem}_{y}_{x}.png')


def walkers(folder: Path) -> None:
    """Boxes of Penn-Fudan's photographs, as COCO's JSON."""
    source = public_data('pennfudan')
    for part, count in (('train', 40), ('val', 15)):
        content = json.loads((source / f'annotations/instances_{part}.json').read_text())
        images = content['images'][:count]
        ids = {image['id'] for image in images}
        boxes = [a | dict(segmentation=[]) for a in content['annotations'] if a['image_id'] in ids]
        (folder / part).mkdir(parents=True)
        for image in images:
            (folder / part / image['file_name']).symlink_to(source / part / image['file_name'])
        (folder / part / 'a.json').write_text(
            json.dumps(dict(content, images=images, annotations=boxes))
        )


def label_maps(folder: Path) -> None:
    """CamVid's label maps of 11 classes."""
    for part, count in (('train', 40), ('val', 15)):
        for kind, source in (('images', 'img_dir'), ('masks', 'ann_dir')):
            (folder / kind / part).mkdir(parents=True)
            for path in sorted((public_data('camvid') / source / part).iterdir())[:count]:
                (folder / kind / part / path.name).symlink_to(path)


@pytest.mark.stress
@pytest.mark.parametrize(
    ('make', 'start', 'measure', 'floor'),
    [
        (partial(bicyclists, masks=False), None, 'coco/bbox_mAP_50', 0.5),
        (partial(bicyclists, masks=True), None, 'coco/bbox_mAP_50', 0.4),
        (walkers, 'cifar10_vittt_nano', 'coco/bbox_mAP_50', 0.5),
        (patches, None, 'accuracy/top1', 85),
        (label_maps, None, 'mIoU', 22),
    ],
    ids=['boxes', 'masks', 'a backbone', 'classes', 'maps'],
)
def test_forty_pictures_teach(
    make: Callable[[Path], None], start: str | None, measure: str, floor: float, tmp_path: Path
) -> None:
    make(tmp_path / 'set')
    model = mmvttt.finetune(tmp_path / 'set', start, work_dir=tmp_path / 'out')
    assert model.metrics[measure] >= floor
