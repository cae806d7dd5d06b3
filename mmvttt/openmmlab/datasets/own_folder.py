"""Reads a folder of annotated pictures in the formats that annotation tools export."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import yaml
from yaml import YAMLError

from mmvttt.errors import DataError
from mmvttt.pictures import SUFFIXES, open_image

from ..reliability.data.images import read_image

_PARTS = dict(
    train='train', training='train', val='val', valid='val', validation='val', test='test',
    testing='test',
)  # fmt: skip
IGNORED = 255
# Files that systems and notebooks write beside a user's.
_HIDDEN = re.compile(r'(^|/)(\.|__MACOSX/)')


@dataclass
class Picture:
    """A picture and what is annotated in it.

    Attributes:
        path: The file.
        part: 'train', 'val', 'test', or '' if no name of a folder or file says so.
        size: (height, width), of boxes.
        objects: Entries of COCO's JSON, in which the name of the class is 'category'.
        target: The file of its label map, or its class.
        id: Its id in COCO's JSON.
    """

    path: Path
    part: str
    size: tuple[int, int] = (0, 0)
    objects: list[dict[str, Any]] = field(default_factory=list)
    target: Any = None
    id: Any = None

    @property
    def classes(self) -> set[Any]:
        """The names of what is annotated in it, unless it has a label map."""
        return {self.target, *(entry['category'] for entry in self.objects)}


@contextmanager
def _reading(path: Path, format: str) -> Iterator[None]:
    """Names the file in which an error occurs."""
    try:
        yield
    except (AttributeError, LookupError, SyntaxError, TypeError, ValueError, YAMLError) as error:
        raise DataError(
            f'{os.fspath(path)!r} cannot be read as {format} ({type(error).__name__}: {error}): '
            'correct it, or move it out of the folder'
        ) from error


@dataclass
class OwnFolder:
    """The annotated pictures of a folder; `task` is 'boxes', 'masks', 'maps' or 'classes'."""

    root: Path
    format: str
    task: str
    classes: tuple[str, ...]
    train: list[Picture]
    val: list[Picture]
    notes: list[str]


Read = tuple[list[str], list[Picture]] | None


def read_folder(root: Path) -> OwnFolder:
    """Reads a folder; without a validation part every fifth picture is held out.

    Raises:
        DataError: It is in none of the formats, or a file in it cannot be read.
    """
    if not root.is_dir():
        raise DataError(f'there is no folder {os.fspath(root)!r}')
    files = sorted(path for path in root.rglob('*') if path.is_file())
    files = [path for path in files if not _HIDDEN.search(path.relative_to(root).as_posix())]
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    reads = ((name, read(root, files, images)) for name, read in _FORMATS.items())
    name, (classes, pictures) = next(((n, r) for n, r in reads if r is not None), ('', ([], [])))
    if not name:
        raise DataError(
            f'{os.fspath(root)!r} has no annotations that are read (pictures: {len(images)}): '
            "COCO's JSON, YOLO's data.yaml or obj.names with *.txt, Pascal VOC's XML, a PNG of one "
            'channel for each picture, or a folder of pictures for each class'
        )
    tested = [p for p in pictures if p.part == 'test']
    rest = {*images}.difference(*((p.path, p.target) for p in pictures))
    pictures = [p for p in pictures if p.part != 'test']
    notes = [f'the test part is left out (pictures: {len(tested)})'] if tested else []
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
    return OwnFolder(root, name, task, tuple(classes), train, val, notes)


def _part(path: Path, root: Path) -> str:
    """The part of the data that folders, or the name of an annotation file, say."""
    inner = path.relative_to(root)
    # CVAT's folder of a part is called obj_train_data.
    names = [name.removeprefix('obj_').removesuffix('_data') for name in inner.parts[:-1]]
    names += re.split(r'[\W_]', inner.stem) if path.suffix == '.json' else ()
    return next((_PARTS[name.lower()] for name in names if name.lower() in _PARTS), '')


class _Pictures:
    """Finds the pictures that annotations name, by file name or by `stem`."""

    def __init__(self, root: Path, images: Sequence[Path], key: str = 'stem') -> None:
        self.root, self.key = root, key
        self.paths: dict[str, list[Path]] = {}
        for path in images:
            self.paths.setdefault(getattr(path, key), []).append(path)

    def find(self, name: str, source: Path) -> Path:
        """The picture of a name, of the same part as its annotations and the nearest to them."""
        name = name.replace('\\', '/').removeprefix('./')

        def likeness(path: Path) -> tuple[bool, bool, int]:
            common = os.path.commonpath([path.parent, source.parent])
            part = _part(path, self.root) == _part(source, self.root)
            return path.as_posix().endswith(name), part, len(common)

        found = self.paths.get(getattr(Path(name), self.key))
        if not found:
            raise DataError(
                f'{os.fspath(source)!r} annotates {name!r}, which is not among the pictures in '
                f'{os.fspath(self.root)!r}'
            )
        return max(found, key=likeness)


def _coco(root: Path, files: list[Path], images: list[Path]) -> Read:
    contents = {}
    for path in (path for path in files if path.suffix == '.json'):
        with _reading(path, 'JSON'):
            content = json.loads(path.read_text(encoding='utf-8'))
            if isinstance(content, dict) and {'images', 'annotations', 'categories'} <= {*content}:
                contents[path] = content
    # COCO's own folder has captions and keypoints of the same pictures, too.
    contents = {p: c for p, c in contents.items() if 'instances' in p.name} or contents
    by_name, pictures, names = _Pictures(root, images, 'name'), [], {}
    lists: dict[tuple[Path, str], Path] = {}
    for path, content in contents.items():
        with _reading(path, 'COCO'):
            categories = {
                category['id']: str(category['name']) for category in content['categories']
            }
            objects: dict[Any, list[dict]] = {image['id']: [] for image in content['images']}
            for entry in content['annotations']:
                named = dict(entry, category=categories[entry['category_id']])
                objects[entry['image_id']].append(named)
            for image in content['images']:
                file = by_name.find(image['file_name'], path)
                part = _part(path, root) or _part(file, root)
                if (other := lists.setdefault((file, part or 'train'), path)) != path:
                    raise ValueError(f'{os.fspath(other)!r} lists {file.name!r}, too')
                size = image['height'], image['width']
                # The ids of several files may be the same.
                number = image['id'] if len(contents) == 1 else None
                pictures.append(Picture(file, part, size, objects[image['id']], id=number))
            names.update(dict.fromkeys(categories.values()))
    return (list(names), pictures) if contents else None


def _yolo(root: Path, files: list[Path], images: list[Path]) -> Read:
    by_stem = _Pictures(root, images)
    labels = [
        path
        for path in files
        if path.suffix == '.txt'
        and path.name not in _NAMES
        and ('labels' in path.relative_to(root).parts or path.stem in by_stem.paths)
    ]
    if not labels:
        return None
    names: Any = None
    parts: dict[str, str] = {}
    for path in sorted(files, key=lambda path: path.name in _NAMES):
        with _reading(path, 'YOLO'):
            if path.suffix in ('.yaml', '.yml'):
                content = yaml.safe_load(path.read_text(encoding='utf-8'))
                if isinstance(content, dict) and content.get('names'):
                    names = names or content['names']
                    for key, part in _PARTS.items():
                        _follow(content.get(key), part, root, parts)
            elif path.name in _NAMES:
                names = names or _lines(path)
    if not names:
        return None
    names = names if isinstance(names, dict) else dict(enumerate(names))
    # A picture without a file has no object.
    annotated = {by_stem.find(path.name, path): path for path in labels}
    pictures = []
    for image in images:
        inner = image.relative_to(root)
        places = map(Path.as_posix, (inner, *inner.parents))
        part = next((parts[place] for place in places if place in parts), _part(image, root))
        picture = Picture(image, part, picture_size(image))
        if image in annotated:
            with _reading(annotated[image], 'YOLO'):
                lines = [[*map(float, line.split())] for line in _lines(annotated[image])]
                if unknown := {line[0] for line in lines} - {*names}:
                    raise ValueError(f'class {min(unknown):g} is none of {names}')
                picture.objects += [_yolo_object(names[n], rest, picture) for n, *rest in lines]
        pictures.append(picture)
    return list(map(str, names.values())), pictures


# Lists of the classes: CVAT's YOLO 1.1, Roboflow's Darknet, labelImg's and Label Studio's.
_NAMES = 'obj.names', '_darknet.labels', 'classes.txt'


def _follow(entries: Any, part: str, root: Path, parts: dict[str, str]) -> None:
    """Adds the folders and pictures that data.yaml names, or a list of pictures it names."""
    for entry in entries if isinstance(entries, list) else [entries or '']:
        names = [name for name in re.split(r'[\\/]', entry) if name not in ('', '.', '..')]
        # The path may begin on another machine.
        for start in range(max(1, len(names) - 1)):
            inner = '/'.join(names[start:])
            if inner not in parts:
                parts[inner] = part
                if inner.endswith('.txt') and (root / inner).is_file():
                    _follow(_lines(root / inner), part, root, parts)


def _lines(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding='utf-8').split('\n'))
    return [line for line in lines if line]


def _yolo_object(name: str, numbers: list[float], picture: Picture) -> dict[str, Any]:
    """A box (centre, width and height) or a polygon, in fractions of the picture."""
    if len(numbers) not in (4, *range(6, 10**6, 2)) or not -0.01 < min(numbers) <= max(numbers) < 2:
        raise ValueError(f'{numbers} are neither a box nor a polygon in fractions of the picture')
    height, width = picture.size
    numbers = [number * (height if i % 2 else width) for i, number in enumerate(numbers)]
    if len(numbers) == 4:
        x, y, w, h = numbers
        return _object(name, x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    xs, ys = numbers[::2], numbers[1::2]
    return _object(name, min(xs), min(ys), max(xs), max(ys), segmentation=[numbers])


def _object(
    name: str, left: float, top: float, right: float, bottom: float, **more: Any
) -> dict[str, Any]:
    box = [left, top, right - left, bottom - top]
    return {'category': str(name), 'bbox': box, 'area': box[2] * box[3], 'iscrowd': 0, **more}


def _voc(root: Path, files: list[Path], images: list[Path]) -> Read:
    by_stem, pictures = _Pictures(root, images), []
    for path in (path for path in files if path.suffix == '.xml'):
        with _reading(path, 'Pascal VOC'):
            tree = ElementTree.parse(path).getroot()
            if tree.tag != 'annotation':
                continue
            image = by_stem.find(path.name, path)
            picture = Picture(image, _part(image, root), picture_size(image))
            for item in tree.iter('object'):
                sides = [float(item.findtext(f'bndbox/{side}', '')) for side in _SIDES]
                # An evaluation ignores these, as VOC's does.
                difficult = item.findtext('difficult', '0').strip() == '1'
                if not (name := item.findtext('name', '').strip()):
                    raise ValueError('an object has no name')
                picture.objects.append(_object(name, *sides) | dict(iscrowd=int(difficult)))
            pictures.append(picture)
    names = sorted({entry['category'] for picture in pictures for entry in picture.objects})
    return (names, pictures) if pictures else None


_SIDES = ('xmin', 'ymin', 'xmax', 'ymax')


def _maps(root: Path, files: list[Path], images: list[Path]) -> Read:
    modes = {p: open_image(p)[0].mode for p in images if p.suffix.lower() == '.png'}
    maps = [path for path, mode in modes.items() if mode in ('L', 'P', '1', 'I', 'I;16')]
    by_stem = _Pictures(root, sorted({*images} - {*maps}))
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
        if stem in by_stem.paths:
            pairs[by_stem.find(f'{stem}.png', path)] = path
    if not pairs or len(pairs) < len(maps):
        return None
    numbers = np.unique([n for path in maps for n in np.unique(np.asarray(open_image(path)[0]))])
    count = int(numbers[numbers != IGNORED].max(initial=0)) + 1
    lists = ('classes.txt', 'labels.txt', '_classes.csv')
    names = next((_lines(path) for path in files if path.name in lists), [])
    if names and names[0].startswith('Pixel Value'):
        # Roboflow's table.
        names = [line.partition(',')[2].strip() for line in names[1:]]
    names += [f'class {number}' for number in range(len(names), count)]
    return names, [Picture(path, _part(path, root), target=map) for path, map in pairs.items()]


def _folders(root: Path, files: list[Path], images: list[Path]) -> Read:
    inner = [path.relative_to(root).parts for path in images]
    parts = bool(inner) and all(names[0].lower() in _PARTS for names in inner)
    if any(len(names) < 2 + parts for names in inner):
        return None
    pictures = [
        Picture(path, _PARTS[names[0].lower()] if parts else '', target=names[parts])
        for path, names in zip(images, inner, strict=True)
    ]
    classes = sorted({picture.target for picture in pictures})
    return (classes, pictures) if len(classes) > 1 else None


_FORMATS: dict[str, Callable[[Path, list[Path], list[Path]], Read]] = {
    'YOLO': _yolo, 'COCO': _coco, 'Pascal VOC': _voc, 'label maps': _maps, 'classes': _folders,
}  # fmt: skip


def picture_size(path: Path) -> tuple[int, int]:
    """(height, width), upright; raises DataError if a file is not an image."""
    facts = read_image(os.fspath(path))
    if facts.problem or facts.size is None:
        raise DataError(f'{os.fspath(path)!r} is among the {facts.problem or "too large images"}')
    return facts.size


def write_lists(data: OwnFolder, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Writes the list of each part, for boxes and masks as COCO's JSON; yields its arguments.

    Label maps are copied, because mmsegmentation needs one folder with the pictures' names.
    """
    for part, pictures in (('train', data.train), ('val', data.val)):
        names = [picture.path.relative_to(data.root).as_posix() for picture in pictures]
        pairs = list(zip(names, pictures, strict=True))
        path, text = out / f'{part}.txt', '\n'.join(names)
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
            path, text = path.with_suffix('.json'), json.dumps(_as_coco(data.classes, pairs))
            arguments = dict(data_prefix=dict(img=''))
        path.write_text(text + '\n', encoding='utf-8')
        yield part, arguments | dict(ann_file=os.fspath(path))


def _as_coco(classes: Sequence[str], pairs: list[tuple[str, Picture]]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(classes, 1)}
    images: list[dict] = []
    annotations: list[dict] = []
    for count, (name, picture) in enumerate(pairs, 1):
        number = count if picture.id is None else picture.id
        height, width = picture.size
        images.append(dict(id=number, file_name=name, height=height, width=width))
        for entry in picture.objects:
            ids = dict(image_id=number, category_id=numbers[entry['category']])
            if picture.id is None:
                ids['id'] = len(annotations) + 1
            annotations.append(entry | ids)
    categories = [dict(id=number, name=name) for name, number in numbers.items()]
    return dict(images=images, annotations=annotations, categories=categories)
