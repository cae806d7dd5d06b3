"""`mmvttt finetune`: what it says and writes; what data of each kind learns from 40 pictures."""

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

import mmvttt
from mmvttt.errors import DataError, ResumeError, UsageError
from mmvttt.openmmlab.apis.finetune import _by_class
from mmvttt.openmmlab.data.own_folder import OwnFolder
from mmvttt.openmmlab.reliability import Preempted

from ..data.sets import coco, make_coco, write
from ..public_data import public_data

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
    path.write_text(path.read_text().replace('32, 16, 4, 0', '32, 16, 6, 0'))
    more: list[str] = []
    mmvttt.finetune(colours, say=more.append, **options)
    assert [line.split()[1] for line in more if line.startswith('  step ')][-2:] == ['5', '6']
    assert len([line for line in more if line.startswith('  step ')]) <= 3
    for others in (dict(start='cifar10_vit_nano'), dict(steps=5)):
        with pytest.raises(UsageError):
            mmvttt.finetune(colours, **(options | others))
    (colours / 'red' / '0.png').replace(colours / 'blue' / 'red.png')
    # The advice has options of this command.
    with pytest.raises(ResumeError, match='--work-dir'):
        mmvttt.finetune(colours, **options)
    with pytest.raises(UsageError):
        mmvttt.finetune(colours, 'pedestrians', work_dir=tmp_path / 'other')


def test_a_folder_is_read_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begins(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr('mmvttt.openmmlab.apis.finetune.train', begins)
    content = coco(6)
    make_coco(tmp_path / 'set', 6)
    for width, error in ((60, DataError), (64, KeyboardInterrupt)):
        content['images'][0]['width'] = width
        write(tmp_path / 'set', content)
        with pytest.raises(error):
            mmvttt.finetune(tmp_path / 'set', work_dir=tmp_path / 'out')


def test_ctrl_c_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(**options: object) -> None:
        # As a training that has saved itself.
        raise Preempted(0)

    monkeypatch.setattr(mmvttt, 'finetune', stopped)
    monkeypatch.setattr('sys.argv', ['finetune.py', 'photos'])
    with pytest.raises(SystemExit, match='130'):
        runpy.run_path(str(Path(__file__).parents[2] / 'tools/finetune.py'), run_name='__main__')
    assert capsys.readouterr().out == 'stopped; the same command resumes it\n'


def test_the_table_of_label_maps() -> None:
    data = OwnFolder(Path(), '', 'maps', ('sky', 'road', 'tree'), [], [], [])
    # Of two pictures: what both have, what one of both has, predictions, labels.
    pictures = [
        [[1, 1, 0], [2, 2, 0], [1, 2, 0], [2, 1, 0]],
        [[1, 0, 0], [1, 3, 0], [1, 3, 0], [1, 0, 0]],
    ]
    measure, rows = _by_class(data, {}, [[torch.tensor(x) for x in areas] for areas in pictures])
    assert measure == 'IoU'
    assert [row[:2] for row in rows] == [('sky', 2), ('road', 1), ('tree', 0)]
    assert [row[2] for row in rows] == pytest.approx([2 / 3, 0.2, np.nan], nan_ok=True)


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


@pytest.mark.stress
@pytest.mark.parametrize(
    ('make', 'start', 'measure', 'floor'),
    [
        (partial(bicyclists, masks=False), None, 'bbox_mAP_50', 0.5),
        (partial(bicyclists, masks=True), None, 'bbox_mAP_50', 0.4),
        (walkers, 'cifar10_vittt_nano', 'bbox_mAP_50', 0.5),
        (patches, None, 'top1', 85),
    ],
    ids=['boxes', 'masks', 'a backbone', 'classes'],
)
def test_forty_pictures_teach(
    make: Callable[[Path], None], start: str | None, measure: str, floor: float, tmp_path: Path
) -> None:
    make(tmp_path / 'set')
    lines: list[str] = []
    mmvttt.finetune(tmp_path / 'set', start, work_dir=tmp_path / 'out', say=lines.append)
    (*_, last) = (line.split() for line in lines if line.startswith('  step '))
    assert float(last[last.index(measure) + 1]) >= floor
