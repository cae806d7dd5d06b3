"""Folders as annotation tools export them: what is read, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvttt.errors import DataError
from mmvttt.openmmlab.data.own_folder import read_folder, write_lists

WIDTH, HEIGHT = 40, 30
POLYGON = [4.0, 3.0, 20.0, 3.0, 20.0, 15.0]


def picture(path: Path, mode: str = 'RGB', seed: str = '') -> None:
    """A noisy picture, or a label map of ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.ones((HEIGHT, WIDTH), np.uint8)
    if mode == 'RGB':
        noise = np.random.default_rng([*f'{path.name}{seed}'.encode()])
        pixels = noise.integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(path)


def text(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def coco(names: list[str], first: int = 7, mask: list | None = None) -> dict:
    """One cat in each picture; a category of the project that no box has."""
    images = [
        dict(id=first + i, file_name=name, width=WIDTH, height=HEIGHT)
        for i, name in enumerate(names)
    ]
    box = dict(bbox=[4, 3, 16, 12], area=192, iscrowd=0, category_id=3, segmentation=mask or [])
    boxes = [dict(box, id=90 + i, image_id=image['id']) for i, image in enumerate(images)]
    return dict(
        images=images,
        annotations=boxes,
        categories=[dict(id=0, name='project'), dict(id=3, name='cat')],
    )


def lists(root: Path, out: Path) -> tuple[dict, dict]:
    parts = dict(write_lists(read_folder(root), out))
    return tuple(json.loads(Path(parts[part]['ann_file']).read_text()) for part in ('train', 'val'))


def test_roboflow_keeps_ids_and_drops_what_has_no_box(tmp_path: Path) -> None:
    root = tmp_path / 'set'
    for part, names in (('train', 'abc'), ('valid', 'ab'), ('test', 'd')):
        for name in names:
            picture(root / part / f'{name}.jpg')
        text(root / part / '_annotations.coco.json', coco([f'{n}.jpg' for n in names]))
    data = read_folder(root)
    assert (data.format, data.task, data.classes) == ('COCO', 'boxes', ('cat',))
    # A YAML beside COCO's JSON is not read, and said.
    text(root / 'notes.yml', 'names: [: x')
    # The files of the same name are those of the same part.
    train, val = lists(root, tmp_path)
    assert [i['file_name'] for i in train['images']] == [f'train/{n}.jpg' for n in 'abc']
    assert [i['file_name'] for i in val['images']] == ['valid/a.jpg', 'valid/b.jpg']
    assert train['annotations'][2]['bbox'] == [4, 3, 16, 12]
    assert {a['category_id'] for a in train['annotations']} == {1}
    assert train['categories'] == [dict(id=1, name='cat')]


def test_what_a_coco_file_leaves_out_follows_from_the_rest(tmp_path: Path) -> None:
    names = [f'{n}.png' for n in range(5)]
    for name in names:
        picture(tmp_path / 'set' / name)
    content = coco(names)
    for entry in content['images'] + content['annotations']:
        for key in ('height', 'width', 'area', 'iscrowd', 'segmentation'):
            entry.pop(key, None)
    for number, entry in enumerate(content['annotations']):
        entry['id'] = number
    # Its picture was removed.
    content['annotations'].append(dict(content['annotations'][0], id=9, image_id=99))
    text(tmp_path / 'set' / 'a.json', content)
    train, val = lists(tmp_path / 'set', tmp_path)
    assert [(i['height'], i['width']) for i in train['images'] + val['images']] == [(30, 40)] * 5
    assert [(a['id'], a['area']) for a in train['annotations']] == [(i, 192) for i in (0, 1, 3, 4)]
    assert 'image_id is not listed' in read_folder(tmp_path / 'set').notes[0]
    for key in ('id', 'file_name'):
        wrong = dict(content, images=[*content['images'][1:], {**content['images'][0]}])
        del wrong['images'][-1][key]
        text(tmp_path / 'set' / 'a.json', wrong)
        with pytest.raises(DataError, match=rf"a\.json': 1 × images whose {key} "):
            read_folder(tmp_path / 'set')


def test_cvat_with_masks_and_a_crowd_is_held_out_by_a_fifth(tmp_path: Path) -> None:
    root = tmp_path / 'set'
    names = [f'{n}.png' for n in range(10)]
    for name in names:
        picture(root / 'images' / name)
    content = coco(names, mask=[POLYGON])
    content['annotations'][0].update(iscrowd=1, segmentation=dict(size=[30, 40], counts=[1200]))
    text(root / 'annotations' / 'instances_default.json', content)
    text(root / 'annotations' / 'captions_default.json', dict(content, categories=[]))
    assert read_folder(root).task == 'masks'
    train, val = lists(root, tmp_path)
    assert [i['id'] for i in val['images']] == [11, 12]  # neighbours, as frames are
    assert train['annotations'][0]['segmentation'] == dict(size=[30, 40], counts=[1200])
    assert train['annotations'][0]['id'] == 90
    assert {i['id'] for i in train['images']} == {*range(7, 17)} - {11, 12}


@pytest.mark.parametrize('parts', ['{part}/{kind}', '{kind}/{part}'])
@pytest.mark.parametrize('names', ["['cat', 'dog']", '{0: cat, 1: dog}'])
def test_yolo(parts: str, names: str, tmp_path: Path) -> None:
    root = tmp_path / 'set'
    for part in ('train', 'val'):
        for name in 'ab':
            picture(root / parts.format(part=part, kind='images') / f'{name}.jpg', seed=part)
        text(root / parts.format(part=part, kind='labels') / 'a.txt', '1 0.5 0.5 0.25 0.2\n\n')
    # The path is wrong from the file's own folder, as Roboflow writes it.
    folders = (f'{part}: ../{parts.format(part=part, kind="images")}' for part in ('train', 'val'))
    text(root / 'data.yaml', '\n'.join([*folders, f'names: {names}']))
    data = read_folder(root)
    assert (data.classes, len(data.train), len(data.val)) == (('dog',), 2, 2)
    assert data.notes == ['classes without an object are left out: cat']
    (box,) = data.train[0].objects
    assert box['bbox'] == pytest.approx([15, 12, 10, 6])
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
    for name in 'abcd':
        picture(tmp_path / f'images/{name}/{name}.jpg')
        text(tmp_path / f'labels/{name}.txt', '0 0.5 0.5 0.25 0.2\n')
    text(tmp_path / 'set.txt', './images/a/a.jpg\n/home/me/set/images/c/c.jpg\nimages/d')
    text(tmp_path / 'labels/classes.txt', 'dog\n')
    text(tmp_path / 'data.yaml', f'names: [cat]\n{parts}\n')
    data = read_folder(tmp_path)
    assert (data.classes, ''.join(p.path.stem for p in data.train)) == (('cat',), train)
    (tmp_path / 'data.yaml').unlink()
    assert read_folder(tmp_path).classes == ('dog',)


@pytest.mark.parametrize('folder', ['obj_train_data', 'train'])
def test_yolo_with_names_in_a_file_of_their_own(folder: str, tmp_path: Path) -> None:
    """CVAT's YOLO 1.1, and Roboflow's Darknet: the labels lie beside the pictures."""
    for name in 'abcde':
        picture(tmp_path / folder / f'{name}.jpg')
        text(tmp_path / folder / f'{name}.txt', '1 0.5 0.5 0.25 0.2\n')
    text(tmp_path / 'train.txt', ''.join(f'data/{folder}/{name}.jpg\n' for name in 'abcde'))
    names = tmp_path / ('obj.names' if folder != 'train' else 'train/_darknet.labels')
    text(names, 'cat\ndog\n')
    data = read_folder(tmp_path)
    assert (data.format, data.classes, len(data.train), len(data.val)) == ('YOLO', ('dog',), 4, 1)
    assert data.val[0].objects[0]['bbox'] == pytest.approx([15, 12, 10, 6])


@pytest.mark.parametrize('folder', ['', 'xml'])
def test_voc_beside_and_apart(folder: str, tmp_path: Path) -> None:
    for name in 'abcde':
        picture(tmp_path / f'{name}.jpg')
        entry = '<object><name>dog</name><difficult>{}</difficult><bndbox><xmin>4</xmin>'
        entry += '<ymin>3</ymin><xmax>20</xmax><ymax>15</ymax></bndbox></object>'
        content = f'<annotation>{entry.format(0)}{entry.format(1)}</annotation>'
        text(tmp_path / folder / f'{name}.xml', content)
    picture(tmp_path / 'f.jpg')
    data = read_folder(tmp_path)
    assert (data.format, data.classes) == ('Pascal VOC', ('dog',))
    assert (len(data.train), len(data.val)) == (4, 1)
    assert ('f.jpg', 'nothing annotates it') in data.left_out
    boxes = [(o['bbox'], o['iscrowd']) for o in data.train[0].objects]
    assert boxes == [([4, 3, 16, 12], 0), ([4, 3, 16, 12], 1)]
    for part, names in (('val', 'ac'), ('train', 'bd'), ('test', 'e'), ('dog_val', 'b  1')):
        text(tmp_path / f'VOC/ImageSets/Main/{part}.txt', '\n'.join(names))
    data = read_folder(tmp_path)
    stems = (''.join(p.path.stem for p in pictures) for pictures in (data.train, data.val))
    assert [*stems] == ['bd', 'ac']
    # One label may be broken, two of six are too many.
    text(tmp_path / folder / 'e.xml', content.replace('dog', ' '))
    assert read_folder(tmp_path).classes == ('dog',)
    text(tmp_path / folder / 'd.xml', content.replace('dog', ' '))
    with pytest.raises(DataError, match=r'd\.xml.*e\.xml'):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ('images', 'maps', 'suffix'),
    [('{part}', '{part}', '_mask'), ('img/{part}', 'ann/{part}', ''), ('{part}/x', '{part}/y', '')],
)
def test_label_maps(images: str, maps: str, suffix: str, tmp_path: Path) -> None:
    root = tmp_path / 'set'
    for part in ('train', 'val'):
        for name in 'ab':
            picture(root / images.format(part=part) / f'{name}.jpg')
            picture(root / maps.format(part=part) / f'{name}{suffix}.png', 'L')
    data = read_folder(root)
    assert (data.task, data.classes) == ('maps', ('class 0', 'class 1'))
    table = 'Pixel Value, Class\n0, soil\n1, crop\n2, weed'
    for file, content in (('_classes.csv', table), ('classes.txt', 'soil\ncrop\nweed\n')):
        text(root / file, content)
        assert read_folder(root).classes == ('soil', 'crop', 'weed')
        (root / file).unlink()
    arguments = dict(write_lists(data, tmp_path))['val']
    names = Path(arguments['ann_file']).read_text().split()
    assert names == [f'{images.format(part="val")}/{name}.jpg' for name in 'ab']
    for name in names:
        copy = Path(arguments['data_prefix']['seg_map_path'], f'{name}.png')
        assert Image.open(copy).mode == 'L'


@pytest.mark.parametrize('parts', [True, False])
def test_class_folders(parts: bool, tmp_path: Path) -> None:
    root = tmp_path / 'set'
    for part in ('train', 'val') if parts else ('',):
        for label in ('train', 'bus'):  # a class of that name
            for name in range(5):
                picture(root / part / label / f'{name}.jpg')
    for path in ('.ipynb_checkpoints/a.jpg', '__MACOSX/bus/b.jpg', 'bus/._c.jpg'):
        picture(root / path)
    data = read_folder(root)
    assert (data.task, data.classes) == ('classes', ('bus', 'train'))
    assert len(data.val) == (10 if parts else 2)
    arguments = dict(write_lists(data, tmp_path))['val']
    lines = Path(arguments['ann_file']).read_text().split('\n')
    assert lines[-2] == f'{"val/" if parts else ""}train/{4 if parts else 2}.jpg 1'


# Of no class, in pixels, neither a box nor a polygon, with a name for the number.
LABELS = ['2 0.5 0.5 0.2 0.2', '0 150 120 30 40', '0 0.5 0.5 0.2', 'cat 0.5 0.5 0.2 0.2']


def test_yolo_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    picture(tmp_path / 'images' / 'a.jpg')
    text(tmp_path / 'data.yaml', 'names: [cat, dog]')
    for label in LABELS:
        text(tmp_path / 'labels' / 'a.txt', label)
        with pytest.raises(DataError, match=r"a\.txt'"):
            read_folder(tmp_path)
    text(tmp_path / 'data.yaml', 'names: [: x')
    with pytest.raises(DataError, match=r"data\.yaml'"):
        read_folder(tmp_path)


def test_a_missing_picture_and_an_unknown_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='there is no folder'):
        read_folder(tmp_path / 'nowhere')
    picture(tmp_path / 'a.jpg')
    with pytest.raises(DataError, match='its 1 pictures'):
        read_folder(tmp_path)
    text(tmp_path / 'annotations.json', coco(['a.jpg', 'b.jpg']))
    with pytest.raises(DataError, match=r'b\.jpg'):
        read_folder(tmp_path)
    text(tmp_path / 'annotations.json', dict(coco(['a.jpg']), categories=[]))
    with pytest.raises(DataError, match=r"annotations\.json'"):
        read_folder(tmp_path)
    # mmdet's table of classes fails at it, after the training.
    broken = dict(coco(['a.jpg']), categories=[dict(id=3, name='cat\u2028dog')])
    text(tmp_path / 'annotations.json', broken)
    picture(tmp_path / 'b.jpg')
    with pytest.raises(DataError, match=r'have line breaks.*cat\\u2028dog'):
        read_folder(tmp_path)


def test_one_channel_photographs_in_class_folders_are_no_label_maps(tmp_path: Path) -> None:
    for label in ('cell', 'dust'):
        for name in range(4):
            picture(tmp_path / label / f'{label}{name}.png', 'L')
    assert read_folder(tmp_path).task == 'classes'
