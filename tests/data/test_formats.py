"""Folders as people have them: each is read by the rules of one format, or refused in words."""

import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from mmvttt.errors import DataError
from mmvttt.openmmlab.data import formats, tree
from mmvttt.openmmlab.data.dataset_config import DatasetConfig
from mmvttt.openmmlab.data.dropped import dropped_objects
from mmvttt.openmmlab.data.formats.names import _read_list
from mmvttt.openmmlab.data.images import read_image
from mmvttt.openmmlab.data.own_folder import as_plan, read_folder, write_lists
from mmvttt.openmmlab.data.write_coco import coco_box, coco_json

H, W = 36, 48
BOX = [6, 9, 12, 18]
OUTLINE = [[6, 9], [18, 9], [18, 27], [6, 27]]
LINE = f'0 {12 / W} {18 / H} {12 / W} {18 / H}'
POLYGON = '0 ' + ' '.join(f'{x / W} {y / H}' for x, y in OUTLINE)
VOC = (
    '<annotation><filename>{}</filename><size><width>48</width><height>36</height></size><object>'
    '<name>cat</name><bndbox><xmin>6</xmin><ymin>9</ymin><xmax>18</xmax><ymax>27</ymax></bndbox>'
    '</object></annotation>'
)
TURNED = VOC.replace('<width>48', '<width>36').replace('<height>36', '<height>48')
NUMBERS = np.zeros((H, W), np.uint8)
NUMBERS[5:20, 5:20], NUMBERS[22:30, 5:20] = 1, 2
BINARY = np.uint8(255) * (NUMBERS > 0)
COLOURS = np.array([[0, 0, 0], [250, 50, 83], [51, 221, 255]], np.uint8)[NUMBERS]
Files = dict[str, Any]


def make(root: Path, files: Files) -> Path:
    """Writes photographs (None), label maps (arrays), JSON, and texts."""
    for number, (name, content) in enumerate(files.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            content = np.random.default_rng(number).integers(0, 255, (H, W, 3), np.uint8)
        if isinstance(content, np.ndarray):
            Image.fromarray(content).save(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), 'utf-8')
    return root


def palette(numbers: np.ndarray) -> bytes:
    """A PNG of one channel with a colour for each number."""
    image, file = Image.fromarray(numbers, 'P'), io.BytesIO()
    image.putpalette(bytes(range(256)) * 3)
    image.save(file, 'png')
    return file.getvalue()


def each(*patterns: tuple[str, Any], count: int = 6) -> Files:
    """The files of pictures 0, 1, …: `{}` in names and texts is the number."""
    return {
        name.format(i): content.format(i) if isinstance(content, str) else content
        for i in range(count)
        for name, content in patterns
    }


def coco(names: list[str], **more: Any) -> dict[str, Any]:
    images = [dict(id=i, file_name=name, width=W, height=H) for i, name in enumerate(names)]
    box = dict(category_id=1, bbox=BOX) | more
    boxes = [dict(id=i + 1, image_id=i, **box) for i in range(len(names))]
    return dict(images=images, annotations=boxes, categories=[dict(id=1, name='cat')])


def shapes(name: str) -> dict[str, Any]:
    shape = dict(label='cat', points=OUTLINE, shape_type='polygon')
    return dict(
        shapes=[shape, shape | dict(label='__ignore__')],
        imagePath=name,
        imageHeight=H,
        imageWidth=W,
    )


def task(name: str) -> dict[str, Any]:
    value = dict(x=12.5, y=25, width=25, height=50, rectanglelabels=['cat'])
    result = [dict(original_width=W, original_height=H, value=value)]
    address = f'/data/upload/1/0123abcd-{name}'
    return dict(data=dict(image=address), annotations=[dict(result=result)])


def cvat(parts: list[tuple[str, int]]) -> str:
    """CVAT's XML for parts and the numbers of their pictures."""
    images = (
        f'<image name="{i}.jpg" width="{W}" height="{H}" subset="{part}">'
        '<box label="cat" xtl="6" ytl="9" xbr="18" ybr="27"/></image>'
        for part, i in parts
    )
    return f'<annotations>{"".join(images)}</annotations>'


PARTS = 'Train', 'Validation'
NAMES = [f'{i}.jpg' for i in range(6)]
YOLO = each(('images/{}.jpg', None), ('labels/{}.txt', LINE)) | {'data.yaml': 'names: [cat]'}
MAPS = each(('images/{}.jpg', None), ('masks/{}.png', NUMBERS))
CLASSES = each(('cat/{}.jpg', None), ('dog/{}.jpg', None))
# The files, and the format, the task, and the pictures that are read in each part.
READ: dict[str, tuple[Files, str, str, int, int]] = {
    'labelme': (
        each(('img/{}.jpg', None))
        | {f'json/{i}.json': shapes(rf'..\img\{i}.jpg') for i in range(6)},
        'labelme', 'masks', 5, 1,
    ),
    'CVAT': (
        each(('images/{}.jpg', None))
        | {'annotations.xml': cvat([(PARTS[i > 3], i) for i in range(6)])},
        'CVAT for images', 'boxes', 4, 2,
    ),
    'a mask that does not fill its picture': (
        each(('{}.jpg', None))
        | {'a.json': coco(NAMES) | dict(annotations=[
            a | dict(segmentation=dict(size=[H, W], counts='garbage~~')) if i == 2 else a
            for i, a in enumerate(coco(NAMES)['annotations'])
        ])},
        'COCO', 'boxes', 4, 1,
    ),
    'capitals in the names of a list': (
        each(('{}.jpg', None)) | {'a.json': coco([f'{i}.JPG' for i in range(6)])},
        'COCO', 'boxes', 5, 1,
    ),
    'a box that ends before it begins': (
        each(('{}.jpg', None), ('{}.xml', VOC)) | {'0.xml': VOC.replace('>6<', '>48<')},
        'Pascal VOC', 'boxes', 4, 1,
    ),
    'two pictures of each class': (
        {f'{c}/{c}{i}.jpg': None for c in range(20) for i in 'ab'}, 'classes', 'classes', 32, 8,
    ),
    'CVAT, a folder for each part': (
        each(('images/Train/{}.jpg', None), ('images/Validation/{}.jpg', None))
        | {'annotations.xml': cvat([(part, i) for part in PARTS for i in range(6)])},
        'CVAT for images', 'boxes', 6, 6,
    ),
    'numbers of a palette': (
        each(('images/{}.jpg', None), ('masks/{}.png', palette(NUMBERS * 7))),
        'label maps', 'maps', 5, 1,
    ),
    'Label Studio': (
        each(('{}.jpg', None)) | {'tasks.json': [task(name) for name in NAMES]},
        'Label Studio', 'boxes', 5, 1,
    ),
    'a CSV of colours': (
        each(('a/{}.png', None), ('a_labels/{}_L.png', COLOURS))
        | {'class_dict.csv': 'name,r,g,b\nsoil,0,0,0\ncrop,250,50,83\nweed,51,221,255\n'},
        'label maps', 'maps', 5, 1,
    ),
    '0 and 255': (
        each(('x_input/{}.jpg', None), ('x_truth/{}_segmentation.png', BINARY)),
        'label maps', 'maps', 5, 1,
    ),
    'a word before each number': (
        each(('image_{}.png', None), ('mask_{}.png', NUMBERS)), 'label maps', 'maps', 5, 1,
    ),
    'a box that is null': (
        each(('{}.jpg', None))
        | {'a.json': coco(NAMES) | dict(annotations=coco(NAMES)['annotations'] + [
            dict(id=9, image_id=3, category_id=1, bbox=None)
        ])},
        'COCO', 'boxes', 4, 1,
    ),
    'the parts of the official COCO': (
        {f'{p}2017/{n}': None for p in ('train', 'val') for n in NAMES}
        | {f'annotations/instances_{p}2017.json': coco(NAMES) for p in ('train', 'val')},
        'COCO', 'boxes', 6, 6,
    ),
    'a path of another machine': (
        each(('pics/{}.jpg', None)) | {'a.json': coco([rf'C:\me\pics\{n}' for n in NAMES])},
        'COCO', 'boxes', 5, 1,
    ),
    'a name with a BOM': (YOLO | {'data.yaml': b'\xef\xbb\xbfnames: [yes]'}, 'YOLO', 'boxes', 5, 1),
    'pictures that no list names': (
        YOLO | {'data.yaml': 'train: t.txt\nval: v.txt\nnames: [cat]', 'images/later.jpg': None}
        | {'t.txt': './images/0.jpg\n./images/1.jpg', 'v.txt': 'images/2.jpg\n'},
        'YOLO', 'boxes', 2, 1,
    ),
    'key points': (
        each(('images/{}.jpg', None), ('labels/{}.txt', f'{LINE} .3 .3 1 .7 .7 1'))
        | {'data.yaml': 'kpt_shape: [2, 3]\nnames: [cat]'},
        'YOLO', 'boxes', 5, 1,
    ),
    'outlines': (YOLO | each(('labels/{}.txt', POLYGON)), 'YOLO', 'masks', 5, 1),
    'drawings beside': (YOLO | each(('debug/{}.jpg', None)), 'YOLO', 'boxes', 5, 1),
    'trimaps beside': (
        each(('images/{}.jpg', None), ('a/xmls/{}.xml', VOC)) | each(('a/trimaps/{}.png', NUMBERS)),
        'Pascal VOC', 'boxes', 5, 1,
    ),
    'capitals': (
        each(('IMAGES/{}.JPG', None), ('LABELS/{}.TXT', LINE)) | {'CLASSES.TXT': 'cat'},
        'YOLO', 'boxes', 5, 1,
    ),
    'an address behind a caption': (
        each(('{}.jpg', None))
        | {'a.json': [t | dict(data=dict(text='a cat', **t['data'])) for t in map(task, NAMES)]},
        'Label Studio', 'boxes', 5, 1,
    ),
    'two years of the same names': (
        {f'{y}/JPEGImages/{i}.jpg': None for y in 'ab' for i in range(3)}
        | {f'{y}/Annotations/{i}.xml': VOC.format(f'{i}.jpg') for y in 'ab' for i in range(3)}
        | {f'{y}/ImageSets/Main/train.txt': '0\n1' for y in 'ab'}
        | {f'{y}/ImageSets/Main/val.txt': '2' for y in 'ab'},
        'Pascal VOC', 'boxes', 4, 2,
    ),
    'one folder deeper': (
        {f's/{p}_set/{c}/{i}.jpg': None for p in ('train', 'dev') for c in 'ab' for i in (1, 2)},
        'classes', 'classes', 4, 4,
    ),
    'parts among other words': (
        {
            f'{kind}_prepped_{part}/{i}.png': None if kind == 'images' else NUMBERS
            for kind in ('images', 'annotations') for part in ('train', 'test') for i in range(6)
        },
        'label maps', 'maps', 5, 1,
    ),
    'a class called train': (CLASSES | each(('train/{}.jpg', None)), 'classes', 'classes', 15, 3),
    'an area that is null': (
        each(('{}.jpg', None)) | {'a.json': coco(NAMES, area=None)}, 'COCO', 'boxes', 5, 1,
    ),
    'colours of CamVid': (
        each(('a/{}.png', None), ('a_full/{}_L.png', COLOURS))
        | {'label_colors.txt': '0 0 0\tsoil\n250 50 83\tcrop\n51 221 255\tweed\n'},
        'label maps', 'maps', 5, 1,
    ),
    "labelme's __ignore__, which has no number": (
        MAPS
        | {'labels.txt': '__ignore__\nsoil\ncrop\nweed', 'class_names.txt': 'soil\ncrop\nweed'},
        'label maps', 'maps', 5, 1,
    ),
    'a table of other pictures': (
        each(('train/cat/{}.jpg', None), ('train/dog/{}.jpg', None), ('test/t{}.jpg', None))
        | {'sample.csv': 't1.jpg,cat\nt2.jpg,cat', 'README.md': '1.jpg 2.jpg'},
        'classes', 'classes', 10, 2,
    ),
    'a table of the folders': (
        CLASSES
        | {'a.csv': 'name,class\n1.jpg,cat\n2.jpg,dog', 'b.csv': 'x\n1,a/cat/1.jpg\n2,dog/2.jpg'},
        'classes', 'classes', 10, 2,
    ),
    'texts that mention pictures': (
        CLASSES
        | {
            'LICENSE.txt': '1.jpg CC-BY 2.0 by Ann - https://a.b/1\n2.jpg CC0 by Bob\n',
            'MD5SUMS': '0a1b cat/1.jpg\n2c3d cat/2.jpg\n',
            'rename.sh': 'mv a.jpg 1.jpg\nmv b.jpg 2.jpg\n',
            'labels.csv': 'name,number\n1.jpg,0\n2.jpg,1\n',
        },
        'classes', 'classes', 10, 2,
    ),
    'the same views of a few persons': (
        {f'{c}/{view}.jpg': None for c in ('ann', 'bob') for view in ('left', 'front', 'right')},
        'classes', 'classes', 4, 2,
    ),
    'a list of pictures and their classes': (
        CLASSES | {'all.txt': 'cat/1.jpg 0\ndog/2.jpg 1\n'}, 'classes', 'classes', 10, 2,
    ),
    'a run inside': (CLASSES | each(('work_dirs/run/{}.jpg', None)), 'classes', 'classes', 10, 2),
}  # fmt: skip
KINDS = 'images', 'masks'
BOMB = 'a: &a [x]\n' + ''.join(f'{c}: &{c} [*a, *a]\n' for c in 'bcd') + 'names: *d\n'
REFUSED: dict[str, tuple[Files, str]] = {
    'two formats': (
        YOLO | {'a.json': coco(NAMES)}, 'several formats.*--format coco.*--format yolo',
    ),
    'YOLO without names': (YOLO | {'data.yaml': '{}'}, '6 label files.*no names of the classes'),
    'aliases': (YOLO | {'data.yaml': BOMB}, 'aliases'),
    'nested lists': (YOLO | {'data.yaml': 'names: ' + '[' * 999}, 'nested too deeply'),
    'entities': ({'a.jpg': None, 'a.xml': '<!DOCTYPE a>' + VOC}, 'defines entities'),
    'JPEG masks': (each(('images/{}.jpg', None), ('masks/{}.jpg', BINARY)), '6 are JPEG'),
    'greys': (MAPS | each(('masks/{}.png', NUMBERS * 38)), '3 numbers from 0 to 76'),
    'too few names': (MAPS | {'classes.txt': 'crop\nweed'}, '2 names .*numbers up to 2'),
    'colours': (MAPS | each(('masks/{}.png', COLOURS)), 'in 3 colours, 3 without a name'),
    'a table beside classes': (CLASSES | {'a.csv': 'a,b\n1.jpg,ox\n2.jpg,cow'}, 'names the pict'),
    'a table of boxes': (
        CLASSES | {'a.csv': 'a,b\n1.jpg,cat,6,9,12,18\n2.jpg,dog,6,9,12,18'}, 'names the pictures',
    ),
    'other sizes': (
        each(('{}.jpg', None), ('{}.xml', VOC.replace('48', '96'))), '6 of 6 .*annotated as 96x36',
    ),
    'broken pictures': (YOLO | each(('images/{}.jpg', b'\xff\xd8'), count=2), '2 of 6 pictures'),
    'rotated boxes': (
        each(('{}.jpg', None), ('{}.xml', VOC.replace('bndbox', 'robndbox'))),
        'no <bndbox> .*only <name>, <robndbox>',
    ),
    'key points without their shape': (
        YOLO | each(('labels/{}.txt', f'{LINE} .3 .3 .7 .7 .2')), 'write kpt_shape',
    ),
    'confidences': (YOLO | each(('labels/{}.txt', f'{LINE} .9')), 'without the score'),
    'maps of a JSON of segments': (
        MAPS | {'a.json': dict(images=[], annotations=[dict(segments_info=[])], categories=[{}])},
        'COCO comes near',
    ),
    'a mask for each object': (
        {f'{i}/{k}/{i}{k}.png': None if k == 'images' else BINARY for i in range(6) for k in KINDS},
        'of the same pictures',
    ),
    'maps of another size': (
        each(('images/{}.jpg', None), ('masks/{}.png', NUMBERS[:9])), '0 of 6 maps .*its size',
    ),
    'folders of classes beside another folder': (
        each(('data/cat/{}.jpg', None), ('data/dog/{}.jpg', None), ('examples/{}.jpg', None)),
        "'data' has 2 folders of pictures",
    ),
    'an archive': ({'a.zip': b'PK'}, "'a.zip' is packed"),
    'one class': (each(('cat/{}.jpg', None)), 'its 6 pictures .*fewer than two folders'),
    'fractions': (
        each(('{}.jpg', None)) | {'a.json': coco(NAMES, bbox=[0.1, 0.2, 0.3, 0.4])}, 'fractions',
    ),
    'corners': (
        each(('{}.jpg', None)) | {'a.json': coco(NAMES, bbox=[20, 20, 40, 30])}, 'they corners',
    ),
    'fractions in an XML': (
        each(('{}.jpg', None), ('{}.xml', re.sub(r'>\d+</(?=[xy])', '>0.5</', VOC))), 'fractions',
    ),
    'corners in a YOLO text': (
        YOLO | each(('labels/{}.txt', '0 .1 .2 .4 .6')), '6 × boxes that reach beyond .*YOLO has',
    ),
    'pictures that were resized': (
        each(('{}.jpg', NUMBERS[::4, ::4]), ('{}.xml', re.sub('<size>.*</size>', '', VOC))),
        'or the pictures were resized',
    ),
    'sizes before a rotation': (
        each(('{}.jpg', None), ('{}.xml', TURNED)),
        'turned by EXIF',
    ),
    'another suffix': (each(('{}.jpg', None)) | {'a.json': coco(['0.png'])}, 'no such picture'),
    'no text': (
        each(('{}.jpg', None))
        | {'a.json': coco(NAMES) | dict(categories=[dict(id=1, name='\ud800')])},
        'not a text',
    ),
    'two JSON files of one picture': (
        each(('{}.jpg', None)) | {f'{p}.json': coco(NAMES) for p in 'ab'}, 'another file does',
    ),
    'nothing': ({'a.jpg': None, 'list.csv': 'a.jpg a'}, 'no format is that of its 1 pictures'),
    'a table of stems': (each(('{}.jpg', None)) | {'list.csv': '1,cat'}, "'list.csv' may annotate"),
    'no picture': ({'a.tfrecord': 'x'}, 'it has no pictures, only 1 × .tfrecord'),
    'rows of another format': (
        each(('images/{}.jpg', None), ('annotations/{}.txt', '6,9,12,18,1,4,0,0'))
        | {'annotations/0.txt': ''},
        'YOLO .*no label is in its format',
    ),
    'a JSON for each picture': (
        each(('a/img/{}.jpg', None), ('a/ann/{}.jpg.json', '{{}}'))
        | each(('b/img/{}.jpg', None), ('b/ann/{}.jpg.json', '{{}}')),
        'has the name of a picture',
    ),
    'boxes in a manifest': (
        CLASSES | {'out.manifest': '"s3://cat/1.jpg" "s3://dog/2.jpg"'}, 'names the pictures',
    ),
    'boxes in a text': (
        CLASSES | {'boxes.txt': 'cat/1.jpg\n1\n6 9 12 18\ndog/2.jpg\n0\n'}, 'names the pictures',
    ),
    'parts beside a folder': (
        {f'{d}/{c}/{c}{i}.jpg': None for d in ('all', 'test', 'train') for c in 'ab' for i in '01'},
        'are parts of the data',
    ),
    'a folder for each picture': (
        each(('{}_json/img.png', None), ('{}_json/label.png', None)), 'a folder for each picture',
    ),
    'depth beside': (
        each(('rgb_{}.png', None), ('depth_{}.png', None), ('seg_{}.png', NUMBERS)), 'may be of',
    ),
}  # fmt: skip


@pytest.mark.parametrize('row', READ.values(), ids=READ)
def test_a_folder_is_read(row: tuple[Files, str, str, int, int], tmp_path: Path) -> None:
    files, *expected = row
    data = read_folder(make(tmp_path / 'set', files))
    plan = json.loads(json.dumps(as_plan(data)))
    assert [plan['format'], plan['task'], len(data.train), len(data.val)] == expected
    objects = [o for picture in plan['pictures'] for o in picture.get('objects', ())]
    assert all(o['bbox'] == pytest.approx(BOX, abs=0.01) for o in objects)
    assert len(dict(write_lists(data, tmp_path / 'out'))) == 2
    # Every file is a picture of the data, or read, or left out with a reason.
    assert all(why for _, why in data.left_out)


@pytest.mark.parametrize('row', REFUSED.values(), ids=REFUSED)
def test_a_folder_is_refused_in_words(row: tuple[Files, str], tmp_path: Path) -> None:
    files, words = row
    with pytest.raises(DataError, match=f'(?s){words}'):
        read_folder(make(tmp_path, files))


def test_an_option_decides_and_a_doubt_yields_to_it(tmp_path: Path) -> None:
    make(tmp_path, YOLO | {'a.json': coco(NAMES)})
    assert read_folder(tmp_path, 'coco').format == 'COCO'
    make(tmp_path / 'b', CLASSES | {'a.csv': '1.jpg,ox\n2.jpg,cow'})
    assert read_folder(tmp_path / 'b', 'classes').classes == ('cat', 'dog')


def test_links_are_followed_once(tmp_path: Path) -> None:
    make(tmp_path / 'elsewhere', each(('{}.jpg', None)))
    make(tmp_path / 'set', {k: v for k, v in YOLO.items() if not k.startswith('images')})
    (tmp_path / 'set/images').symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'set/labels/round').symlink_to(tmp_path / 'set')
    data = read_folder(tmp_path / 'set')
    assert len(data.train) + len(data.val) == 6


def test_a_zip_file_is_a_folder(tmp_path: Path) -> None:
    root = make(tmp_path / 'set', YOLO)
    with zipfile.ZipFile(tmp_path / 'set.zip', 'w') as archive:
        for name in YOLO:
            archive.write(root / name, name)
        archive.writestr('../outside.txt', 'x')
    data = read_folder(tmp_path / 'set.zip', work_dir=tmp_path / 'work')
    assert (data.format, len(data.train)) == ('YOLO', 5)
    assert not (tmp_path / 'outside.txt').exists()


def test_a_damaged_zip_file_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    whole, work = tmp_path / 'set.zip', tmp_path / 'work'
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_STORED):
        with zipfile.ZipFile(whole, 'w', method) as archive:
            archive.writestr('cat/a.bmp', b'0123456789' * 1000)
        content = whole.read_bytes()
        # The compressed bytes begin after 30 bytes, the name, and what LZMA says of itself.
        begin = 30 + len('cat/a.bmp') + 9
        damaged = content[:begin] + b'\xff' * 12 + content[begin + 12 :]
        for data in (damaged, content[:-20], content[: len(content) // 2], b''):
            whole.write_bytes(data)
            with pytest.raises(DataError, match='cannot be unpacked'):
                read_folder(whole, work_dir=work)
            assert not list(work.iterdir())


def test_a_zip_file_is_not_unpacked_into_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    with zipfile.ZipFile(tmp_path / 'set.zip', 'w'):
        pass
    monkeypatch.setattr(os, 'getuid', lambda: 4711)
    (tmp_path / 'mmvttt_4711').mkdir()
    with pytest.raises(DataError, match='belongs to another user'):
        read_folder(tmp_path / 'set.zip')
    (tmp_path / 'mmvttt_4711').rmdir()
    (tmp_path / 'mmvttt_4711').touch()
    with pytest.raises(DataError, match='cannot be written'):
        read_folder(tmp_path / 'set.zip')


def test_a_zip_file_may_be_unpacked_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / 'set', YOLO)
    shutil.make_archive(str(root), 'zip', root)
    unpack, work = zipfile.ZipFile.extractall, tmp_path / 'work'

    def slow(self: zipfile.ZipFile, path: str) -> None:
        monkeypatch.undo()
        read_folder(tmp_path / 'set.zip', work_dir=work)
        unpack(self, path)

    monkeypatch.setattr(zipfile.ZipFile, 'extractall', slow)
    assert len(read_folder(tmp_path / 'set.zip', work_dir=work).train) == 5
    assert len(list((work / 'unpacked').iterdir())) == 1


def test_what_takes_seconds_is_said_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, '_LARGE', 100)
    for module in (tree, formats.coco):
        monkeypatch.setattr(module, '_MANY', 5)
    content = coco([f'{i}.jpg' for i in range(12)])
    root, lines = make(tmp_path, each(('{}.jpg', None), count=12) | {'a.json': content}), []
    read_folder(root, say=lines.append)
    # Five have been opened to see whether they are label maps.
    assert lines == ['  reads a.json, 0 MB', '  checks 12 annotations', '  opens 7 pictures']


def test_a_text_that_cannot_be_opened_is_left_out(tmp_path: Path) -> None:
    files = tree.Tree(make(tmp_path, CLASSES | {'a.json': '"1.jpg" "2.jpg"', 'b.json': ''}))
    os.remove(tmp_path / 'b.json')
    assert files.naming(files.images) == ['a.json']
    assert 'cannot be opened' in files.left_out['b.json']


def test_names_that_a_list_cannot_hold_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, CLASSES | each(('cat/x{}.jpg', None), ('dog/x{}.jpg', None), count=9))
    os.rename(tmp_path / 'cat/0.jpg', os.fsencode(tmp_path) + b'/cat/\xff.jpg')
    os.rename(tmp_path / 'cat/1.jpg', tmp_path / 'cat/a\nb.jpg')
    data = read_folder(tmp_path)
    assert len(data.train) + len(data.val) == 28
    assert all(note.isprintable() for note in data.notes)


def test_what_was_seen_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    root, work = make(tmp_path / 'set', YOLO), tmp_path / 'work'
    first = read_folder(root, work_dir=work)
    assert as_plan(read_folder(root, work_dir=work)) == as_plan(first)
    Image.new('RGB', (99, 99)).save(root / 'images/3.jpg')
    data = read_folder(root, work_dir=work)
    sizes = {p.inner: p.image['width'] for p in [*data.train, *data.val]}
    assert (sizes['images/3.jpg'], sizes['images/2.jpg']) == (99, W)


def test_copies_and_frames_stay_together(tmp_path: Path) -> None:
    copies = {f'images/f{i}_jpg.rf.{c * 9}.jpg': None for i in 'abcdefgh' for c in 'xyz'}
    frames = {f'images/{video}_{i:04}.jpg': None for video in ('street', 'yard') for i in range(20)}
    labels = {k.replace('images', 'labels').replace('.jpg', '.txt'): LINE for k in copies | frames}
    data = read_folder(make(tmp_path, copies | frames | labels | {'classes.txt': 'cat'}))
    train, val = ({p.path.name for p in part} for part in (data.train, data.val))
    assert data.split
    sources = [{n.partition('.rf.')[0] for n in names if '.rf.' in n} for names in (train, val)]
    assert not sources[0] & sources[1]
    numbers = [(n[:-8], int(n[-8:-4])) for n in val if '.rf.' not in n]
    beside = [f'{v}{i + d:04}.jpg' in train for v, i in numbers for d in (-1, 1)]
    assert 0 < sum(beside) <= len(numbers)


def test_the_pipeline_says_which_objects_it_drops(tmp_path: Path) -> None:
    """Objects of 3 pixels after the training's own resizing."""
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='Resize', scale=(12, 9), keep_ratio=True),
        dict(type='FilterAnnotations', min_gt_bbox_wh=(8, 8)),
        dict(type='PackDetInputs'),
    ]
    root = make(tmp_path, each(('{}.jpg', None)) | {'a.json': coco(NAMES, area=216, iscrowd=0)})
    config = dict(
        type='CocoDataset', data_root=os.fspath(root), ann_file='a.json', pipeline=pipeline,
        data_prefix=dict(img=''), metainfo=dict(classes=('cat',)),
    )  # fmt: skip
    before = np.random.get_state()[1].tolist()
    (text,) = dropped_objects(DatasetConfig(config, scope='mmdet'))
    assert text.startswith('6 of 6 objects are dropped by FilterAnnotations at 12x9: ')
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize('kind', [np.uint8, np.uint16, np.int32, np.float32])
def test_opencv_is_the_judge_of_a_tiff(kind: type, tmp_path: Path) -> None:
    path = os.fspath(tmp_path / 'a.tif')
    Image.fromarray(NUMBERS.astype(kind)).save(path)
    assert (read_image(path).problem is None) == (cv2.imread(path) is not None)


def test_what_lists_name_and_is_not_there_is_said(tmp_path: Path) -> None:
    files = each(('JPEGImages/{}.jpg', None), ('Annotations/{}.xml', VOC)) | {
        'ImageSets/Main/train.txt': '0\n1\n2\n3\n7\n8\n9\n10\n11',
        'ImageSets/Main/val.txt': '3\n4',
    }
    data = read_folder(make(tmp_path / 'voc', files))
    assert [p.path.stem for p in data.train] == ['0', '1', '2']
    assert '5 of 9 lines of ImageSets/Main/train.txt name no picture' in data.notes[0]
    assert '1 pictures are listed to train and to validate' in data.notes[1]
    lists = {'train.txt': 'images/0.jpg\nimages/1.jpg\nimages/9.jpg', 'val.txt': 'images/2.jpg'}
    yaml = {'data.yaml': 'train: train.txt\nval: val.txt\nnames: [cat]'}
    data = read_folder(make(tmp_path / 'yolo', YOLO | lists | yaml))
    assert '1 of 3 lines of train.txt name no picture' in data.notes[0]


def test_a_class_that_is_only_validated_is_said(tmp_path: Path) -> None:
    files = {
        f'{part}/{c}/{part}{i}.jpg': None for part in ('train', 'val') for c in 'ab' for i in NAMES
    }
    data = read_folder(make(tmp_path, files | {'val/fox/1.jpg': None}))
    assert 'classes of which no picture is trained, only validated: fox' in data.notes


def test_xml_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    """The bytes of this character in GBK are a letter in UTF-8."""
    head = '<?xml version="1.0" encoding="{}"?>'
    codings = ('gbk', 'gbk'), ('utf-8', 'utf-16'), ('utf-16', 'utf-16'), ('utf-8', 'ISO-8859-1')
    for encoding, declared in codings:
        text = head.format(declared) + VOC.format('').replace('cat', '猫')
        files = each(('{}.jpg', None)) | {f'{i}.xml': text.encode(encoding) for i in range(6)}
        assert read_folder(make(tmp_path / encoding / declared, files)).classes == ('猫',)


def test_names_of_label_maps_follow_their_numbers(tmp_path: Path) -> None:
    root = make(tmp_path, MAPS)
    assert any('no list names the numbers 0 to 2' in note for note in read_folder(root).notes)
    for text, first in (
        ('__ignore__\nsoil\ncrop\nweed', 'soil'),
        ('0: soil\n1: crop\n2: weed\n', 'soil'),
        ('id,name\n0,soil\n1,crop\n2,weed', 'soil'),
        ('1: crop\n2: weed', 'class 0'),
        ('\ncrop\nweed\n', 'class 0'),
    ):
        make(root, {'labels.txt': text})
        data = read_folder(root)
        assert data.classes == (first, 'crop', 'weed')
        assert not any('no list names' in note for note in data.notes)


def test_objects_that_are_cut_off_are_read(tmp_path: Path) -> None:
    wide = re.sub('<xmax>.*</xmax>', '<xmax>55</xmax>', VOC)
    for name, files in (
        ('voc', each(('{}.jpg', None), ('{}.xml', wide))),
        ('yolo', YOLO | each(('labels/{}.txt', '0 .95 .5 .2 .4'))),
    ):
        assert len(read_folder(make(tmp_path / name, files)).train) == 5


def test_numbers_before_names_and_in_them(tmp_path: Path) -> None:
    inside = (
        *('1 euro', '1 cent\n2 euro', '1 low\n2 mid\n3 high', 'cat\n1 dog', '2 euro\n1 euro'),
        *('no person\n1 person\n2 persons', '0 percent\n1 percent'),
    )
    path = tmp_path / 'a.txt'
    for content, names in (
        *((text, text.split('\n')) for text in inside),
        ('0: soil\n1: 3d printer', ['soil', '3d printer']),
        ('0 soil\n1 3d printer', ['soil', '3d printer']),
        ('Pixel Value, Class\n0, soil\n1, 3d printer', ['soil', '3d printer']),
        ('1,soil\n2,crop', ['', 'soil', 'crop']),
        ('__ignore__\n', []),
    ):
        path.write_text(content)
        assert _read_list(path) == names


def test_an_empty_line_in_a_list_of_names_is_a_number(tmp_path: Path) -> None:
    root = make(tmp_path, YOLO | {'data.yaml': '', 'obj.names': 'ox\n\n1 euro\n2 euro\n'})
    for number, name in (('0', 'ox'), ('2', '1 euro'), ('3', '2 euro')):
        make(root, each(('labels/{}.txt', number + LINE[1:])))
        assert read_folder(root).classes == (name,)
    make(root, each(('labels/{}.txt', '1' + LINE[1:])))
    with pytest.raises(DataError, match='class 1 is none of ox, 1 euro, 2 euro'):
        read_folder(root)


def test_folders_of_the_same_names_are_said(tmp_path: Path) -> None:
    """They may be two sides of one picture, such as dark and bright."""
    text = 'each folder holds files of the same names (0.jpg, 1.jpg, … (6)): '
    assert any(note.startswith(text) for note in read_folder(make(tmp_path, CLASSES)).notes)
    os.remove(tmp_path / 'cat/0.jpg')
    assert not any(note.startswith(text[:20]) for note in read_folder(tmp_path).notes)


def test_255_is_no_class_of_a_label_map(tmp_path: Path) -> None:
    numbers = NUMBERS.copy()
    numbers[0] = 255
    data = read_folder(make(tmp_path, each(('images/{}.jpg', None), ('masks/{}.png', numbers))))
    assert data.classes == ('class 0', 'class 1', 'class 2')


def test_masks_are_trained_if_all_objects_have_one(tmp_path: Path) -> None:
    content = coco(
        NAMES, segmentation=[[x for point in OUTLINE for x in point]], area=216, iscrowd=0
    )
    root = make(tmp_path, each(('{}.jpg', None)) | {'a.json': content})
    assert read_folder(root).task == 'masks'
    content['annotations'][0].pop('segmentation')
    data = read_folder(make(tmp_path, {'a.json': content}))
    assert data.task == 'boxes'
    assert any('5 of 6 objects have a mask' in note for note in data.notes)


def test_a_file_of_coco_is_numbered_from_1() -> None:
    """COCOeval takes 0 for "not matched"."""
    box = coco_box('cat', 1, 2, 5, 8)
    content = json.loads(coco_json(['dog', 'cat'], [({}, [box, box]), ({}, [box])]))
    assert [a['id'] for a in content['annotations']] == [1, 2, 3]
    assert [a['image_id'] for a in content['annotations']] == [1, 1, 2]
    assert {a['category_id'] for a in content['annotations']} == {2}


def test_a_fifth_of_the_label_maps_is_held_out(tmp_path: Path) -> None:
    files = each(('images/{}.jpg', None), ('masks/{}.png', NUMBERS), count=50)
    data = read_folder(make(tmp_path, files))
    assert (len(data.train), len(data.val)) == (40, 10)
