"""Pascal VOC's XML: a file of boxes for each picture."""

from __future__ import annotations

import math
from xml.etree.ElementTree import Element

from ..reading import Label, Reading
from ..text_files import read_xml
from ..tree import Tree
from ..write_coco import coco_box

_CORNERS = ('xmin', 'ymin', 'xmax', 'ymax')


def read(tree: Tree) -> Reading:
    """Reads each XML of an annotation: the picture is its <filename>, else that of its own name."""
    reading, labels = Reading('Pascal VOC', sets='Main'), []
    for source, root in tree.contents('.xml', read_xml):
        if root.tag != 'annotation':
            continue
        stem = source.rpartition('/')[2][:-4]
        label = Label(source, (root.findtext('filename') or '').strip() or stem, stem=stem)
        try:
            label.size = root.findtext('size/height'), root.findtext('size/width')
            label.objects = [_object(item) for item in root.iter('object')]
        except ValueError as error:
            label.fault = str(error)
        labels.append(label)
    reading.pair(tree, labels, 'XML files')
    return reading


def _object(item: Element) -> dict:
    if not (name := item.findtext('name', '').strip()):
        raise ValueError('an object has no <name>')
    if item.find('bndbox') is None:
        tags = ', '.join(f'<{child.tag}>' for child in item)
        raise ValueError(f'an object has no <bndbox> (upright box), only {tags:.200}')
    corners = [float(item.findtext(f'bndbox/{s}') or '') for s in _CORNERS]
    if not all(map(math.isfinite, corners)):
        raise ValueError(f'a box is {corners}')
    if corners[0] > corners[2] or corners[1] > corners[3]:
        raise ValueError(f'a box ends before it begins: {corners}')
    box = coco_box(name, *corners)
    # An evaluation ignores these, as VOC's does.
    return box | dict(iscrowd=int(item.findtext('difficult', '0').strip() == '1'))
