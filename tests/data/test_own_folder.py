"""Folders as annotation tools export them: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmvttt.errors import DataError
from mmvttt.openmmlab.data.own_folder import read_folder, write_lists

from .test_formats import BOX, LINE, VOC, Files, H, W, coco, each, make

DOG = '1' + LINE[1:]
ONES = np.ones((H, W), np.uint8)


def exported(names: list[str], **more: Any) -> dict[str, Any]:
    """COCO's JSON with a tool's own ids, and a category of the project that no box has."""
    content = coco(names, category_id=3, area=216, iscrowd=0, **more)
    for image in content['images']:
        image['id'] += 7
    for box in content['annotations']:
        box.update(id=box['id'] + 89, image_id=box['image_id'] + 7)
    return dict(content, categories=[dict(id=0, name='project'), dict(id=3, name='cat')])


def lists(root: Path, out: Path) -> tuple[dict, dict]:
    parts = dict(write_lists(read_folder(root), out))
    return tuple(json.loads(Path(parts[part]['ann_file']).read_text()) for part in ('train', 'val'))


def test_roboflow_keeps_ids_and_drops_what_has_no_box(tmp_path: Path) -> None:
    files: Files = {}
    for part, names in (('train', 'abc'), ('valid', 'ab'), ('test', 'd')):
        files |= {f'{part}/{name}.jpg': None for name in names}
        files[f'{part}/_annotations.coco.json'] = exported([f'{name}.jpg' for name in names])
    data = read_folder(root := make(tmp_path / 'set', files))
    assert (data.format, data.task, data.classes) == ('COCO', 'boxes', ('cat',))
    # A YAML beside COCO's JSON is not read, and said.
    make(root, {'notes.yml': 'names: [: x'})
    # The files of the same name are those of the same part.
    train, val = lists(root, tmp_path)
    assert [i['file_name'] for i in train['images']] == [f'train/{n}.jpg' for n in 'abc']
    assert [i['file_name'] for i in val['images']] == ['valid/a.jpg', 'valid/b.jpg']
    assert train['annotations'][2]['bbox'] == BOX
    assert {a['category_id'] for a in train['annotations']} == {1}
    assert train['categories'] == [dict(id=1, name='cat')]


def test_what_a_coco_file_leaves_out_follows_from_the_rest(tmp_path: Path) -> None:
    content = exported([f'{n}.png' for n in range(5)])
    for entry in content['images'] + content['annotations']:
        for key in ('height', 'width', 'area', 'iscrowd'):
            entry.pop(key, None)
    for number, entry in enumerate(content['annotations']):
        entry['id'] = number
    # Its picture was removed.
    content['annotations'].append(dict(content['annotations'][0], id=9, image_id=99))
    root = make(tmp_path / 'set', each(('{}.png', None), count=5) | {'a.json': content})
    train, val = lists(root, tmp_path)
    assert [(i['height'], i['width']) for i in train['images'] + val['images']] == [(H, W)] * 5
    assert [(a['id'], a['area']) for a in train['annotations']] == [(i, 216) for i in (0, 1, 3, 4)]
    assert 'image_id is not listed' in read_folder(root).notes[0]
    for key in ('id', 'file_name'):
        wrong = dict(content, images=[*content['images'][1:], {**content['images'][0]}])
        del wrong['images'][-1][key]
        make(root, {'a.json': wrong})
        with pytest.raises(DataError, match=rf"a\.json': 1 × images whose {key} "):
            read_folder(root)


def test_cvat_with_masks_and_a_crowd_is_held_out_by_a_fifth(tmp_path: Path) -> None:
    crowd = dict(size=[H, W], counts=[H * W])
    content = exported([f'{n}.png' for n in range(10)], segmentation=[[6, 9, 18, 9, 18, 27]])
    content['annotations'][0].update(iscrowd=1, segmentation=crowd)
    files = each(('images/{}.png', None), count=10) | {
        'annotations/instances_default.json': content,
        'annotations/captions_default.json': dict(content, categories=[]),
    }
    root = make(tmp_path / 'set', files)
    assert read_folder(root).task == 'masks'
    train, val = lists(root, tmp_path)
    assert [i['id'] for i in val['images']] == [11, 12]  # neighbours, as frames are
    assert train['annotations'][0]['segmentation'] == crowd
    assert train['annotations'][0]['id'] == 90
    assert {i['id'] for i in train['images']} == {*range(7, 17)} - {11, 12}


@pytest.mark.parametrize('parts', ['{part}/{kind}', '{kind}/{part}'])
@pytest.mark.parametrize('names', ["['cat', 'dog']", '{0: cat, 1: dog}'])
def test_yolo(parts: str, names: str, tmp_path: Path) -> None:
    files: Files = {}
    # The path is wrong from the file's own folder, as Roboflow writes it.
    lines = [f'names: {names}']
    for part in ('train', 'val'):
        images, labels = (parts.format(part=part, kind=kind) for kind in ('images', 'labels'))
        files |= {f'{images}/{name}.jpg': None for name in 'ab'} | {f'{labels}/a.txt': DOG + '\n\n'}
        lines.append(f'{part}: ../{images}')
    data = read_folder(make(tmp_path / 'set', files | {'data.yaml': '\n'.join(lines)}))
    assert (data.classes, len(data.train), len(data.val)) == (('dog',), 2, 2)
    assert data.notes == ['classes without an object are left out: cat']
    (box,) = data.train[0].objects
    assert box['bbox'] == pytest.approx(BOX)
    assert data.train[1].objects == []


@pytest.mark.parametrize(
    ('parts', 'train'),
    [
        ('train: [set.txt]\nval: ../images/b', 'acd'),
        (r'train: C:\set\images\b' + '\nval: set.txt', 'b'),
        # An evaluation on what is trained: a fifth is held out instead.
        ('path: .\ntrain: images\nval: images\ntest:', 'abd'),
    ],
)
def test_yolo_follows_its_parts(parts: str, train: str, tmp_path: Path) -> None:
    files: Files = {f'images/{name}/{name}.jpg': None for name in 'abcd'}
    files |= {f'labels/{name}.txt': LINE for name in 'abcd'} | {'labels/classes.txt': 'dog\n'}
    files['set.txt'] = './images/a/a.jpg\n/home/me/set/images/c/c.jpg\nimages/d'
    data = read_folder(make(tmp_path, files | {'data.yaml': f'names: [cat]\n{parts}\n'}))
    assert (data.classes, ''.join(p.path.stem for p in data.train)) == (('cat',), train)
    (tmp_path / 'data.yaml').unlink()
    assert read_folder(tmp_path).classes == ('dog',)


@pytest.mark.parametrize(
    ('folder', 'names'), [('obj_train_data', 'obj.names'), ('train', 'train/_darknet.labels')]
)
def test_yolo_with_names_in_a_file_of_their_own(folder: str, names: str, tmp_path: Path) -> None:
    """CVAT's YOLO 1.1, and Roboflow's Darknet: the labels lie beside the pictures."""
    files = each((f'{folder}/{{}}.jpg', None), (f'{folder}/{{}}.txt', DOG), count=5)
    files['train.txt'] = ''.join(f'data/{folder}/{i}.jpg\n' for i in range(5))
    data = read_folder(make(tmp_path, files | {names: 'cat\ndog\n'}))
    assert (data.format, data.classes, len(data.train), len(data.val)) == ('YOLO', ('dog',), 4, 1)
    assert data.val[0].objects[0]['bbox'] == pytest.approx(BOX)


@pytest.mark.parametrize('folder', ['', 'xml/'])
def test_voc_beside_and_apart(folder: str, tmp_path: Path) -> None:
    easy = VOC[VOC.index('<object>') : VOC.index('</annotation>')]
    content = (
        f'<annotation>{easy}{easy.replace("<bnd", "<difficult>1</difficult><bnd")}</annotation>'
    )
    make(tmp_path, {f'{name}.jpg': None for name in 'abcdef'})
    make(tmp_path, {f'{folder}{name}.xml': content for name in 'abcde'})
    data = read_folder(tmp_path)
    assert (data.format, data.classes) == ('Pascal VOC', ('cat',))
    assert (len(data.train), len(data.val)) == (4, 1)
    assert ('f.jpg', 'nothing annotates it') in data.left_out
    assert [(o['bbox'], o['iscrowd']) for o in data.train[0].objects] == [(BOX, 0), (BOX, 1)]
    parts = dict(val='a\nc', train='b\nd', test='e', dog_val='b  1')
    make(tmp_path, {f'VOC/ImageSets/Main/{part}.txt': text for part, text in parts.items()})
    data = read_folder(tmp_path)
    stems = (''.join(p.path.stem for p in pictures) for pictures in (data.train, data.val))
    assert [*stems] == ['bd', 'ac']
    # One label may be broken, two of six are too many.
    broken = content.replace('cat', ' ')
    make(tmp_path, {f'{folder}e.xml': broken})
    assert read_folder(tmp_path).classes == ('cat',)
    make(tmp_path, {f'{folder}d.xml': broken})
    with pytest.raises(DataError, match=r'd\.xml.*e\.xml'):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ('images', 'maps', 'suffix'),
    [('{part}', '{part}', '_mask'), ('img/{part}', 'ann/{part}', ''), ('{part}/x', '{part}/y', '')],
)
def test_label_maps(images: str, maps: str, suffix: str, tmp_path: Path) -> None:
    files: Files = {}
    for part in ('train', 'val'):
        files |= {f'{images.format(part=part)}/{name}.jpg': None for name in 'ab'}
        files |= {f'{maps.format(part=part)}/{name}{suffix}.png': ONES for name in 'ab'}
    data = read_folder(root := make(tmp_path / 'set', files))
    assert (data.task, data.classes) == ('maps', ('class 0', 'class 1'))
    table = 'Pixel Value, Class\n0, soil\n1, crop\n2, weed'
    for file, content in (('_classes.csv', table), ('classes.txt', 'soil\ncrop\nweed\n')):
        make(root, {file: content})
        assert read_folder(root).classes == ('soil', 'crop', 'weed')
        (root / file).unlink()
    arguments = dict(write_lists(data, tmp_path))['val']
    names = Path(arguments['ann_file']).read_text().split()
    assert names == [f'{images.format(part="val")}/{name}.jpg' for name in 'ab']
    for name in names:
        copy = Path(arguments['data_prefix']['seg_map_path'], f'{name}.png')
        assert Image.open(copy).mode == 'L'


@pytest.mark.parametrize('parts', [('train/', 'val/'), ('',)])
def test_class_folders(parts: tuple[str, ...], tmp_path: Path) -> None:
    # A class of that name.
    folders = [f'{part}{label}' for part in parts for label in ('train', 'bus')]
    files: Files = {f'{folder}/{name}.jpg': None for folder in folders for name in range(5)}
    hidden = ('.ipynb_checkpoints/a.jpg', '__MACOSX/bus/b.jpg', 'bus/._c.jpg')
    data = read_folder(make(tmp_path / 'set', files | dict.fromkeys(hidden)))
    assert (data.task, data.classes) == ('classes', ('bus', 'train'))
    assert len(data.val) == (10 if len(parts) == 2 else 2)
    arguments = dict(write_lists(data, tmp_path))['val']
    lines = Path(arguments['ann_file']).read_text().split('\n')
    assert lines[-2] == f'{parts[-1]}train/{4 if len(parts) == 2 else 2}.jpg 1'


# Of no class, in pixels, neither a box nor a polygon, with a name for the number.
LABELS = ['2 0.5 0.5 0.2 0.2', '0 150 120 30 40', '0 0.5 0.5 0.2', 'cat 0.5 0.5 0.2 0.2']


def test_yolo_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    make(tmp_path, {'images/a.jpg': None, 'data.yaml': 'names: [cat, dog]'})
    for label in LABELS:
        make(tmp_path, {'labels/a.txt': label})
        with pytest.raises(DataError, match=r"a\.txt'"):
            read_folder(tmp_path)
    make(tmp_path, {'data.yaml': 'names: [: x'})
    with pytest.raises(DataError, match=r"data\.yaml'"):
        read_folder(tmp_path)


def test_a_missing_picture_and_an_unknown_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='there is no folder'):
        read_folder(tmp_path / 'nowhere')
    make(tmp_path, {'a.jpg': None})
    # mmdet's table of classes fails at a line break, after the training.
    odd = dict(exported(['a.jpg']), categories=[dict(id=3, name='cat\u2028dog')])
    for content, words in (
        (exported(['a.jpg', 'b.jpg']), r'b\.jpg'),
        (dict(exported(['a.jpg']), categories=[]), r"annotations\.json'"),
        (odd, r'have line breaks.*cat\\u2028dog'),
    ):
        make(tmp_path, {'annotations.json': content})
        with pytest.raises(DataError, match=words):
            read_folder(tmp_path)


def test_one_channel_photographs_in_class_folders_are_no_label_maps(tmp_path: Path) -> None:
    files = {f'{label}/{label}{i}.png': ONES for label in ('cell', 'dust') for i in range(4)}
    assert read_folder(make(tmp_path, files)).task == 'classes'
