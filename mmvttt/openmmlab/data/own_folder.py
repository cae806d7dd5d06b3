"""Reads a folder of annotated pictures in the formats that annotation tools export."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import yaml
from yaml import YAMLError

from mmvttt.errors import DataError
from mmvttt.pictures import SUFFIXES, open_image

from .coco import coco_entries
from .findings import Findings
from .images import read_image
from .write_coco import coco_box, coco_json

_PARTS = dict(
    train='train', training='train', val='val', valid='val', validation='val', test='test',
    testing='test',
)  # fmt: skip
IGNORED = 255
# Files that systems and notebooks write beside a user's.
_HIDDEN = re.compile(r'(^|/)(\.|__MACOSX/)')


@dataclass
class Picture:
    """A picture, its part of the data or '', and what is annotated in it.

    `image` and `objects` are entries of `coco_json`, `target` is a class or a label map's file.
    """

    path: Path
    part: str
    image: dict[str, Any] = field(default_factory=dict)
    objects: list[dict[str, Any]] = field(default_factory=list)
    target: Any = None

    @property
    def classes(self) -> set[Any]:
        """The names of what is annotated in it, unless it has a label map."""
        return {self.target, *(entry['category'] for entry in self.objects)}


@contextmanager
def _reading(path: Path, format: str) -> Iterator[None]:
    """Names the file in which an error occurs."""
    try:
        yield
    except DataError:
        raise
    except (AttributeError, LookupError, SyntaxError, TypeError, ValueError, YAMLError) as error:
        raise DataError(
            f'{os.fspath(path)!r} cannot be read as {format} ({type(error).__name__}: {error}): '
            'correct it, or move it out of the folder'
        ) from error


@dataclass
class OwnFolder:
    """The annotated pictures of a folder; `task` is 'boxes', 'masks', 'maps' or 'classes'.

    `parts` are those that a file lists, by the inner path of a folder or the name of a picture.
    """

    root: Path
    format: str = ''
    task: str = ''
    classes: tuple[str, ...] = ()
    train: list[Picture] = field(default_factory=list)
    val: list[Picture] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.images = [path for path in self.files if path.suffix.lower() in SUFFIXES]
        self.named: dict[str, list[Path]] = {}
        for path in self.images:
            for name in (path.name, path.stem):
                self.named.setdefault(name, []).append(path)

    def find(self, name: str, source: Path) -> Path:
        """The picture of a name or stem: of its annotations' part, and the nearest to them."""
        name = name.replace('\\', '/').removeprefix('./')

        def likeness(path: Path) -> tuple[bool, bool, int]:
            same_part = self.part(path) == self.part(source)
            return path.as_posix().endswith(name), same_part, len({*path.parts} & {*source.parts})

        pictures = self.named.get(name.rpartition('/')[2])
        if not pictures:
            raise DataError(
                f'{os.fspath(source)!r} annotates {name!r}, which is not among the pictures in '
                f'{os.fspath(self.root)!r}'
            )
        return max(pictures, key=likeness)

    def part(self, path: Path) -> str:
        """The part of a file: as lists say, else as folders, or the name of a JSON, say."""
        inner = path.relative_to(self.root)
        places = inner.as_posix(), path.name, path.stem, *map(Path.as_posix, inner.parents)
        # CVAT's folder of a part is called obj_train_data.
        names = [name.removeprefix('obj_').removesuffix('_data') for name in inner.parts[:-1]]
        names += re.split(r'[\W_]', inner.stem) if path.suffix == '.json' else ()
        parts = *map(self.parts.get, places), *(_PARTS.get(name.lower()) for name in names)
        return next(filter(None, parts), '')

    def follow(self, entries: Any, part: str) -> None:
        """Notes the part of the folders and pictures named, or of those in a list named."""
        for entry in entries if isinstance(entries, list) else [entries or '']:
            names = [name for name in re.split(r'[\\/]', entry) if name not in ('', '.', '..')]
            # The path may begin on another machine.
            for start in range(max(1, len(names) - 1)):
                inner = '/'.join(names[start:])
                if inner not in self.parts:
                    self.parts[inner] = part
                    if inner.endswith('.txt') and (self.root / inner).is_file():
                        self.follow(_lines(self.root / inner), part)

    def listed(self) -> list[str]:
        """The classes in the first file that lists them."""
        names = next((_lines(path) for path in self.files if path.name in _NAMES), [])
        if names and names[0].startswith('Pixel Value'):
            # Roboflow's table.
            names = [line.partition(',')[2].strip() for line in names[1:]]
        return names


Read = tuple[list[str], list[Picture]] | None
# Lists of classes by CVAT (YOLO 1.1), Roboflow (Darknet, label maps), labelImg and Label Studio.
_NAMES = 'obj.names', '_darknet.labels', '_classes.csv', 'classes.txt', 'labels.txt'


def read_folder(root: Path) -> OwnFolder:
    """Reads a folder; without a validation part every fifth picture is held out.

    Raises:
        DataError: It is in none of the formats, or a file in it cannot be read.
    """
    if not root.is_dir():
        raise DataError(f'there is no folder {os.fspath(root)!r}')
    files = sorted(path for path in root.rglob('*') if path.is_file())
    files = [path for path in files if not _HIDDEN.search(path.relative_to(root).as_posix())]
    folder = OwnFolder(root, files=files)
    reads = ((name, read(folder)) for name, read in _FORMATS.items())
    name, (classes, pictures) = next(((n, r) for n, r in reads if r is not None), ('', ([], [])))
    if not name:
        raise DataError(
            f'{os.fspath(root)!r} has no annotations that are read (pictures: '
            f"{len(folder.images)}): COCO's JSON, YOLO's data.yaml or obj.names with *.txt, Pascal "
            "VOC's XML, a PNG of one channel for each picture, or a folder of pictures for each "
            'class'
        )
    tested = [p for p in pictures if p.part == 'test']
    rest = {*folder.images}.difference(*((p.path, p.target) for p in pictures))
    pictures = [p for p in pictures if p.part != 'test']
    notes = folder.notes
    if tested:
        notes.append(f'the test part is left out (pictures: {len(tested)})')
    if rest:
        notes.append(f'pictures without annotations are left out: {len(rest)}, e.g. {min(rest)}')
    val = [p for p in pictures if p.part == 'val']
    train = [p for p in pictures if p.part != 'val']
    if not val or not train:
        train = [p for number, p in enumerate(pictures) if number % 5 != 2]
        val = pictures[2::5]
        notes.append(f'every fifth picture is held out for validation (pictures: {len(val)})')
    task = {'label maps': 'maps', 'classes': 'classes'}.get(name, 'boxes')
    if task == 'boxes':
        objects = [o for p in train for o in p.objects if not o.get('iscrowd')]
        masks = sum(bool(o.get('segmentation')) for o in objects)
        task = 'masks' if 0 < masks == len(objects) else 'boxes'
        if 0 < masks < len(objects):
            notes.append(f'only {masks} of {len(objects)} objects have a mask: boxes are trained')
        present = {o['category'] for p in pictures for o in p.objects}
        if absent := [name for name in classes if name not in present]:
            notes.append(f'classes without an object are left out: {", ".join(absent)}')
        classes = [name for name in classes if name in present]
    if not classes or not train or not val:
        raise DataError(
            f'{os.fspath(root)!r} ({name}) needs pictures to train (there are {len(train)}), '
            f'pictures to validate ({len(val)}), and annotated classes ({len(classes)})'
        )
    return replace(folder, format=name, task=task, classes=tuple(classes), train=train, val=val)


def _coco(folder: OwnFolder) -> Read:
    contents = {}
    for path in (path for path in folder.files if path.suffix == '.json'):
        with _reading(path, 'JSON'):
            content = json.loads(path.read_text(encoding='utf-8'))
            if isinstance(content, dict) and {'images', 'annotations', 'categories'} <= {*content}:
                contents[path] = content
    # COCO's own folder has captions and keypoints of the same pictures, too.
    contents = {p: c for p, c in contents.items() if 'instances' in p.name} or contents
    pictures, names = [], {}
    for path, content in contents.items():
        findings = Findings(repr(os.fspath(path)))
        with _reading(path, 'COCO'):
            # Entries that some programs leave out, and that follow from the rest.
            for number, entry in enumerate(content['annotations'], 1):
                entry.setdefault('id', number)
                entry.setdefault('area', math.prod(entry.get('bbox', ())[2:]))
            for image in content['images']:
                if 'file_name' in image and not (image.get('height') and image.get('width')):
                    image.update(picture_size(folder.find(image['file_name'], path)))
            images, annotations, categories = coco_entries(content, findings)
        if findings.errors:
            raise DataError(f'{findings.key}: {"; ".join(findings.errors)}')
        folder.notes += [f'{path.relative_to(folder.root)}: {text}' for text in findings.warnings]
        labels = {category['id']: category['name'] for category in categories}
        objects: dict[Any, list[dict]] = {image['id']: [] for image in images}
        for entry in annotations:
            objects[entry['image_id']].append(entry | dict(category=labels[entry['category_id']]))
        for image in images:
            file = folder.find(image['file_name'], path)
            part = folder.part(path) or folder.part(file)
            pictures.append(Picture(file, part, image, objects[image['id']]))
        names.update(dict.fromkeys(labels.values()))
    # The ids of several files may be the same.
    for picture in pictures if len(contents) > 1 else ():
        for entry in (picture.image, *picture.objects):
            del entry['id']
    return (list(names), pictures) if contents else None


def _yolo(folder: OwnFolder) -> Read:
    labels = [
        path
        for path in folder.files
        if path.suffix == '.txt'
        and path.name not in _NAMES
        and ('labels' in path.relative_to(folder.root).parts or path.stem in folder.named)
    ]
    names: Any = None
    for path in folder.files if labels else ():
        if path.suffix in ('.yaml', '.yml'):
            with _reading(path, 'YOLO'):
                content = yaml.safe_load(path.read_text(encoding='utf-8'))
                if isinstance(content, dict) and content.get('names'):
                    names = names or content['names']
                    for key, part in _PARTS.items():
                        folder.follow(content.get(key), part)
    if not labels or not (names := names or folder.listed()):
        return None
    names = names if isinstance(names, dict) else dict(enumerate(names))
    # A picture without a file has no object.
    annotated = {folder.find(path.stem, path): path for path in labels}
    pictures = []
    for image in folder.images:
        picture = Picture(image, folder.part(image), picture_size(image))
        if image in annotated:
            with _reading(annotated[image], 'YOLO'):
                lines = [[*map(float, line.split())] for line in _lines(annotated[image])]
                if unknown := {line[0] for line in lines} - {*names}:
                    raise ValueError(f'class {min(unknown):g} is none of {names}')
                picture.objects += [_yolo_object(names[n], rest, picture) for n, *rest in lines]
        pictures.append(picture)
    return list(map(str, names.values())), pictures


def _lines(path: Path) -> list[str]:
    with _reading(path, 'text'):
        lines = (line.strip() for line in path.read_text(encoding='utf-8').split('\n'))
        return [line for line in lines if line]


def _yolo_object(name: str, numbers: list[float], picture: Picture) -> dict[str, Any]:
    """A box (centre, width and height) or a polygon, in fractions of the picture."""
    if len(numbers) not in (4, *range(6, 10**6, 2)) or not -0.01 < min(numbers) <= max(numbers) < 2:
        raise ValueError(f'{numbers} are neither a box nor a polygon in fractions of the picture')
    height, width = picture.image['height'], picture.image['width']
    numbers = [number * (height if i % 2 else width) for i, number in enumerate(numbers)]
    if len(numbers) == 4:
        x, y, w, h = numbers
        return coco_box(name, x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    xs, ys = numbers[::2], numbers[1::2]
    return coco_box(name, min(xs), min(ys), max(xs), max(ys), segmentation=[numbers])


def _voc(folder: OwnFolder) -> Read:
    pictures = []
    for path in folder.files:
        if path.parent.name == 'Main' and (part := _PARTS.get(path.stem)):
            folder.follow(path.relative_to(folder.root).as_posix(), part)
    for path in (path for path in folder.files if path.suffix == '.xml'):
        with _reading(path, 'Pascal VOC'):
            tree = ElementTree.parse(path).getroot()
            if tree.tag != 'annotation':
                continue
            image = folder.find(path.stem, path)
            picture = Picture(image, folder.part(image), picture_size(image))
            for item in tree.iter('object'):
                texts = (item.findtext(f'bndbox/{s}', '') for s in ('xmin', 'ymin', 'xmax', 'ymax'))
                # An evaluation ignores these, as VOC's does.
                difficult = item.findtext('difficult', '0').strip() == '1'
                if not (name := item.findtext('name', '').strip()):
                    raise ValueError('an object has no name')
                box = coco_box(name, *map(float, texts))
                picture.objects.append(box | dict(iscrowd=int(difficult)))
            pictures.append(picture)
    names = sorted({entry['category'] for picture in pictures for entry in picture.objects})
    return (names, pictures) if pictures else None


def _maps(folder: OwnFolder) -> Read:
    images = folder.images
    modes = {p: open_image(p)[0].mode for p in images if p.suffix.lower() == '.png'}
    maps = [path for path, mode in modes.items() if mode in ('L', 'P', '1', 'I', 'I;16')]
    photos = OwnFolder(folder.root, files=sorted({*images} - {*maps}))
    others = {path.stem for path in images if path not in modes}
    coloured = not maps and others == {re.sub('_mask$', '', path.stem) for path in modes}
    if coloured and others and open_image(min(modes))[0].getcolors():
        raise DataError(
            f'{os.fspath(min(modes))!r} is a label map in colours: write one channel, the number '
            'of the class of each pixel'
        )
    pairs = {}
    for path in maps:
        # Roboflow adds the suffix.
        stem = re.sub('_mask$', '', path.stem)
        if stem in photos.named:
            pairs[photos.find(stem, path)] = path
    if not pairs or len(pairs) < len(maps):
        return None
    numbers = np.unique([n for path in maps for n in np.unique(np.asarray(open_image(path)[0]))])
    count = int(numbers[numbers != IGNORED].max(initial=0)) + 1
    names = folder.listed()
    names += [f'class {number}' for number in range(len(names), count)]
    return names, [Picture(path, folder.part(path), target=map) for path, map in pairs.items()]


def _folders(folder: OwnFolder) -> Read:
    inner = [path.relative_to(folder.root).parts for path in folder.images]
    parts = bool(inner) and all(names[0].lower() in _PARTS for names in inner)
    if any(len(names) < 2 + parts for names in inner):
        return None
    pictures = [
        Picture(path, _PARTS[names[0].lower()] if parts else '', target=names[parts])
        for path, names in zip(folder.images, inner, strict=True)
    ]
    classes = sorted({picture.target for picture in pictures})
    return (classes, pictures) if len(classes) > 1 else None


_FORMATS: dict[str, Callable[[OwnFolder], Read]] = {
    'YOLO': _yolo, 'COCO': _coco, 'Pascal VOC': _voc, 'label maps': _maps, 'classes': _folders,
}  # fmt: skip


def picture_size(path: Path) -> dict[str, int]:
    """Height and width, upright; raises DataError if a file is not an image."""
    facts = read_image(os.fspath(path))
    if facts.problem or facts.size is None:
        raise DataError(f'{os.fspath(path)!r} is among the {facts.problem or "too large images"}')
    return dict(zip(('height', 'width'), facts.size, strict=True))


def write_lists(data: OwnFolder, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Writes the list of each part, for boxes and masks as COCO's JSON; yields its arguments.

    Label maps are copied, because mmsegmentation needs one folder with the pictures' names.
    """
    for part, pictures in (('train', data.train), ('val', data.val)):
        pairs = [(p.path.relative_to(data.root).as_posix(), p) for p in pictures]
        path, text = out / f'{part}.txt', '\n'.join(name for name, _ in pairs)
        arguments: dict[str, Any] = dict(data_prefix='')
        if data.task == 'classes':
            text = '\n'.join(f'{name} {data.classes.index(p.target)}' for name, p in pairs)
        elif data.task == 'maps':
            maps = out / 'maps'
            for name, picture in pairs:
                (maps / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(picture.target, maps / f'{name}.png')
            prefixes = dict(img_path='', seg_map_path=os.fspath(maps))
            arguments = dict(data_prefix=prefixes, img_suffix='', seg_map_suffix='.png')
        else:
            entries = ((p.image | dict(file_name=name), p.objects) for name, p in pairs)
            path, text = path.with_suffix('.json'), coco_json(data.classes, entries)
            arguments = dict(data_prefix=dict(img=''))
        path.write_text(text + '\n', encoding='utf-8')
        yield part, arguments | dict(ann_file=os.fspath(path))
