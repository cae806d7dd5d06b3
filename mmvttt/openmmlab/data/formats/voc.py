"""Pascal VOC's XML: a file of boxes for each picture."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from xml.etree.ElementTree import Element

from mmvttt.errors import DataError

from ..parts import part_of
from ..reading import Reading
from ..text_files import read_xml
from ..tree import Tree
from ..write_coco import coco_box

_CORNERS = ('xmin', 'ymin', 'xmax', 'ymax')


def read(tree: Tree) -> Reading:
    """Reads each XML of an annotation: the picture is its <filename>, else that of its own name."""
    reading = Reading('Pascal VOC', sets='Main')
    folders: dict[str, dict[str, Element]] = defaultdict(dict)
    for source in tree.having('.xml'):
        root = tree.content(source, read_xml)
        if root is not None and root.tag == 'annotation':
            folders[source.rpartition('/')[0]][source] = root
    count = sum(map(len, folders.values()))
    reading.evidence = f'{count} XML files' if count else ''
    for folder, roots in folders.items():
        try:
            _add(tree, reading, folder, roots)
        except DataError as error:
            reading.lacks.append(str(error))
    reading.classes.sort()
    if count and not reading.pictures and reading.broken:
        reading.lacks.append(next(iter(reading.broken.values())))
    return reading


def _add(tree: Tree, reading: Reading, folder: str, roots: dict[str, Element]) -> None:
    stems = {source: source.rpartition('/')[2][:-4] for source in roots}
    names = {s: (root.findtext('filename') or '').strip() or stems[s] for s, root in roots.items()}
    files, own = tree.find(names.values(), folder), tree.find(stems.values(), folder)
    counts = Counter(files[name] for name in names.values())
    for source, root in roots.items():
        reading.used.add(source)
        inner = files[names[source]]
        # A copied file may have kept the name of another picture.
        if inner is None or counts[inner] > 1:
            inner = own[stems[source]]
        if inner is None:
            reading.broken[source] = f'it annotates {names[source]!r}, which is not there'
            continue
        if reading.repeated(inner, source):
            continue
        try:
            sides = (int(float(root.findtext(f'size/{s}') or 0)) for s in ('height', 'width'))
            height, width = sides
            objects = [_object(item) for item in root.iter('object')]
        except (ValueError, OverflowError) as error:
            reading.broken[source] = str(error)
            reading.left_out[inner] = 'its label cannot be read'
            continue
        image = dict(height=height, width=width) if height and width else {}
        reading.add(tree, inner, part_of(inner), objects, image=image)


def _object(item: Element) -> dict:
    if not (name := item.findtext('name', '').strip()):
        raise ValueError('an object has no <name>')
    if item.find('bndbox') is None:
        raise ValueError('an object has no <bndbox>: rotated boxes are not read')
    corners = [float(item.findtext(f'bndbox/{s}') or '') for s in _CORNERS]
    if not all(map(math.isfinite, corners)):
        raise ValueError(f'a box is {corners}')
    box = coco_box(name, *corners)
    # An evaluation ignores these, as VOC's does.
    return box | dict(iscrowd=int(item.findtext('difficult', '0').strip() == '1'))
