"""Shapes as labelme, CVAT (XML for images) and Label Studio (JSON) export them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..reading import Label, Reading
from ..text_files import read_json, read_xml
from ..tree import Tree
from ..write_coco import coco_box

# Label Studio puts eight digits before the name of an uploaded file.
_UPLOADED = re.compile(r'^[0-9a-f]{8}-')
_LABELS = 'rectanglelabels', 'polygonlabels'
# labelme's label for regions without a class.
_IGNORED = '__ignore__'
# Errors of values that are not what the format says.
_FAULTS = AttributeError, LookupError, TypeError, ValueError


def labelme(tree: Tree) -> Reading:
    """Reads a JSON with the shapes of each picture."""
    reading, labels = Reading('labelme'), []
    for source, content in tree.contents('.json', read_json):
        if not (isinstance(content, dict) and 'shapes' in content and 'imagePath' in content):
            continue
        content.pop('imageData', None)
        label = Label(source, str(content['imagePath']))
        label.size = content.get('imageHeight'), content.get('imageWidth')
        labels.append(label)
        # Parts of one object have the same group.
        groups: dict[Any, list[dict]] = defaultdict(list)
        try:
            for number, shape in enumerate(content['shapes']):
                kind, points = shape.get('shape_type', 'polygon'), shape['points']
                if shape['label'] == _IGNORED:
                    reading.skipped[_IGNORED] += 1
                    continue
                if kind == 'circle':
                    (x, y), (u, v) = points
                    radius = math.hypot(x - u, y - v)
                    points = [[x - radius, y - radius], [x + radius, y + radius]]
                elif kind not in ('rectangle', 'mask') and (kind != 'polygon' or len(points) < 3):
                    reading.skipped[kind] += 1
                    continue
                group = number if shape.get('group_id') is None else f'{shape["group_id"]}'
                item = _outline(shape['label'], points, kind == 'polygon')
                groups[shape['label'], group].append(item)
            label.objects = [_joined(parts) for parts in groups.values()]
        except _FAULTS as error:
            label.fault = f'{type(error).__name__}: {error}'
    reading.pair(tree, labels, 'JSON files with shapes')
    return reading


def cvat(tree: Tree) -> Reading:
    """Reads "CVAT for images 1.1": one XML for all pictures."""
    reading, labels = Reading('CVAT for images'), []
    for source, root in tree.contents('.xml', read_xml):
        if root.tag != 'annotations':
            continue
        reading.used.add(source)
        if root.find('track') is not None:
            reading.evidence = repr(source)
            reading.lacks.append('it is of "CVAT for video": export "CVAT for images", or COCO')
        for image in root.iter('image'):
            label = Label(source, image.get('name', ''), subset=image.get('subset') or '')
            label.size = image.get('height'), image.get('width')
            labels.append(label)
            for item in image:
                try:
                    label.objects.append(_cvat_object(item.tag, item.attrib))
                except LookupError:
                    reading.skipped[item.tag] += 1
                except ValueError as error:
                    reading.skipped[f'{item.tag} ({error})'] += 1
    reading.pair(tree, labels, 'pictures in its XML')
    return reading


def _cvat_object(kind: str, values: dict[str, str]) -> dict[str, Any]:
    """An element of a picture; raises LookupError for kinds that are not learned."""
    if kind == 'polygon':
        points = [[*map(float, p.split(','))] for p in values.get('points', '').split(';')]
        return _outline(values.get('label'), points, True)
    corners = dict(box=('xtl', 'ytl', 'xbr', 'ybr'), mask=('left', 'top', 'width', 'height'))[kind]
    x, y, u, v = (float(values.get(key) or '') for key in corners)
    if float(values.get('rotation') or 0):
        raise ValueError('rotated boxes')
    end = (u, v) if kind == 'box' else (x + u, y + v)
    return _outline(values.get('label'), [(x, y), end], False)


def label_studio(tree: Tree) -> Reading:
    """Reads the JSON of Label Studio: rectangles and polygons in hundredths of the picture."""
    reading, labels = Reading('Label Studio'), []
    for source, tasks in tree.contents('.json', read_json):
        if not (isinstance(tasks, list) and tasks and all(map(_is_task, tasks))):
            continue
        reading.used.add(source)
        for task in tasks:
            # One of the task's data is the picture's address.
            names = [_file(value) for value in task['data'].values() if isinstance(value, str)]
            names += [_UPLOADED.sub('', name.rpartition('/')[2]) for name in names]
            here = (name for name in names if tree.has(name.rpartition('/')[2]))
            label = Label(source, next(here, next(iter(names), '')))
            try:
                answers = [a for a in task['annotations'] if not a.get('was_cancelled')]
                if not answers:
                    continue
                reading.skipped['another annotator'] += len(answers) - 1
                for item in answers[0].get('result') or ():
                    value = item.get('value', {})
                    kind = next((k for k in _LABELS if value.get(k)), None)
                    if kind is None or item.get('image_rotation') or value.get('rotation'):
                        reading.skipped[item.get('type', 'result')] += 1
                        continue
                    label.size = height, width = item['original_height'], item['original_width']
                    points = value.get('points')
                    if kind == 'rectanglelabels':
                        x, y, w, h = (value[k] for k in ('x', 'y', 'width', 'height'))
                        points = [[x, y], [x + w, y + h]]
                    points = [[x * width / 100, y * height / 100] for x, y in points]
                    label.objects.append(_outline(value[kind][0], points, kind == 'polygonlabels'))
            except _FAULTS as error:
                label.fault = f'{type(error).__name__}: {error}'
            labels.append(label)
    reading.pair(tree, labels, 'tasks in its JSON')
    return reading


def _file(address: str) -> str:
    """The path in the address of an uploaded file, or of one on the server's disk."""
    parts = urlsplit(address)
    return parse_qs(parts.query).get('d', [parts.path])[0]


def _is_task(task: Any) -> bool:
    return (
        isinstance(task, dict)
        and isinstance(task.get('data'), dict)
        and isinstance(task.get('annotations'), list)
    )


def _outline(name: Any, points: Iterable[Sequence[float]], polygon: bool) -> dict[str, Any]:
    if not isinstance(name, str) or not name:
        raise ValueError('an object has no label')
    points = [(float(x), float(y)) for x, y in points]
    if not all(math.isfinite(n) for point in points for n in point):
        raise ValueError('a number is not finite')
    xs, ys = zip(*points, strict=True)
    mask = dict(segmentation=[[n for point in points for n in point]]) if polygon else {}
    return coco_box(name, min(xs), min(ys), max(xs), max(ys), **mask)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One object of several outlines."""
    boxes = [(x, y, x + w, y + h) for x, y, w, h in (part['bbox'] for part in parts)]
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    masks = [line for part in parts for line in part.get('segmentation', ())]
    more = dict(segmentation=masks) if masks else {}
    name = parts[0]['category']
    return coco_box(name, min(lefts), min(tops), max(rights), max(bottoms), **more)
