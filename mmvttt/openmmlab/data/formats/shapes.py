"""Shapes as labelme, CVAT (XML for images) and Label Studio (JSON) export them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mmvttt.errors import DataError

from ..parts import part_of
from ..reading import Reading
from ..text_files import read_json, read_xml
from ..tree import Tree
from ..write_coco import coco_box

# Label Studio puts eight digits before the name of an uploaded file.
_UPLOADED = re.compile(r'^[0-9a-f]{8}-')
_LABELS = 'rectanglelabels', 'polygonlabels'
# A picture: its name, its part, (height, width) as annotated, and its objects.
Entry = tuple[str, str, tuple[Any, Any], list[dict]]


def labelme(tree: Tree) -> Reading:
    """Reads a JSON with the shapes of each picture."""
    reading, skipped = Reading('labelme'), Counter[str]()
    folders: dict[str, list[Entry]] = defaultdict(list)
    for source in tree.having('.json'):
        content = tree.content(source, read_json)
        if not (isinstance(content, dict) and 'shapes' in content and 'imagePath' in content):
            continue
        content.pop('imageData', None)
        reading.used.add(source)
        try:
            groups: dict[Any, list[dict]] = defaultdict(list)
            for number, shape in enumerate(content['shapes']):
                kind, points = shape.get('shape_type', 'polygon'), shape['points']
                if kind == 'circle':
                    (x, y), (u, v) = points
                    radius = ((x - u) ** 2 + (y - v) ** 2) ** 0.5
                    points = [[x - radius, y - radius], [x + radius, y + radius]]
                if kind in ('rectangle', 'circle', 'mask') or (
                    kind == 'polygon' and len(points) > 2
                ):
                    # Parts of one object have the same group.
                    key = (
                        shape['label'],
                        number if shape.get('group_id') is None else f'{shape["group_id"]}',
                    )
                    groups[key].append(_outline(shape['label'], points, kind == 'polygon'))
                else:
                    skipped[kind] += 1
            objects = [_joined(parts) for parts in groups.values()]
            size = content.get('imageHeight'), content.get('imageWidth')
            folders[source.rpartition('/')[0]].append(
                (str(content['imagePath']), '', size, objects)
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reading.broken[source] = f'{type(error).__name__}: {error}'
    return _finish(tree, reading, folders, skipped, 'JSON files with shapes')


def cvat(tree: Tree) -> Reading:
    """Reads "CVAT for images 1.1": one XML for all pictures."""
    reading, skipped = Reading('CVAT for images'), Counter[str]()
    folders: dict[str, list[Entry]] = defaultdict(list)
    for source in tree.having('.xml'):
        root = tree.content(source, read_xml)
        if root is None or root.tag != 'annotations':
            continue
        reading.used.add(source)
        if root.find('track') is not None:
            reading.evidence = repr(source)
            reading.lacks.append('it is of "CVAT for video": export "CVAT for images", or COCO')
        for image in root.iter('image'):
            objects = []
            for item in image:
                name, at = item.get('label', ''), item.get
                try:
                    if item.tag == 'box':
                        x, y, u, v = (float(at(k) or '') for k in ('xtl', 'ytl', 'xbr', 'ybr'))
                        if float(at('rotation') or 0):
                            raise ValueError('rotated boxes')
                        objects.append(_outline(name, [(x, y), (u, v)], False))
                    elif item.tag == 'polygon':
                        points = [[*map(float, p.split(','))] for p in at('points', '').split(';')]
                        objects.append(_outline(name, points, True))
                    elif item.tag == 'mask':
                        x, y, w, h = (
                            float(at(k) or '') for k in ('left', 'top', 'width', 'height')
                        )
                        objects.append(coco_box(name, x, y, x + w, y + h))
                    else:
                        skipped[item.tag] += 1
                except ValueError as error:
                    skipped[f'{item.tag} ({error})'] += 1
            size = image.get('height'), image.get('width')
            entry = image.get('name', ''), part_of(image.get('subset') or ''), size, objects
            folders[source.rpartition('/')[0]].append(entry)
    return _finish(tree, reading, folders, skipped, 'pictures in its XML')


def label_studio(tree: Tree) -> Reading:
    """Reads the JSON of Label Studio: rectangles and polygons in hundredths of the picture."""
    reading, skipped = Reading('Label Studio'), Counter[str]()
    folders: dict[str, list[Entry]] = defaultdict(list)
    for source in tree.having('.json'):
        tasks = tree.content(source, read_json)
        if not (isinstance(tasks, list) and tasks and all(_is_task(task) for task in tasks)):
            continue
        reading.used.add(source)
        for task in tasks:
            address = next((v for v in task['data'].values() if isinstance(v, str)), '')
            parts = urlsplit(address)
            name = parse_qs(parts.query).get('d', [parts.path])[0]
            file = name.rpartition('/')[2]
            if not tree.has(file):
                name = _UPLOADED.sub('', file)
            objects, size = [], (0, 0)
            try:
                answers = [a for a in task['annotations'] if not a.get('was_cancelled')]
                if not answers:
                    continue
                skipped['another annotator'] += len(answers) - 1
                for item in answers[0].get('result', ()):
                    value = item.get('value', {})
                    kind = next((k for k in _LABELS if value.get(k)), None)
                    if kind is None or item.get('image_rotation') or value.get('rotation'):
                        skipped[item.get('type', 'result')] += 1
                        continue
                    width, height = item['original_width'], item['original_height']
                    size, points = (height, width), value.get('points')
                    if kind == 'rectanglelabels':
                        x, y, w, h = (value[k] for k in ('x', 'y', 'width', 'height'))
                        points = [[x, y], [x + w, y + h]]
                    points = [[x * width / 100, y * height / 100] for x, y in points]
                    objects.append(_outline(value[kind][0], points, kind == 'polygonlabels'))
                folders[source.rpartition('/')[0]].append((name, '', size, objects))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                reading.broken[f'{source}: {name}'] = f'{type(error).__name__}: {error}'
    return _finish(tree, reading, folders, skipped, 'tasks in its JSON')


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


def _finish(
    tree: Tree, reading: Reading, folders: dict[str, list[Entry]], skipped: Counter, what: str
) -> Reading:
    """Finds the pictures, and notes the shapes that no training learns."""
    count = sum(map(len, folders.values()))
    reading.evidence = f'{count} {what}' if count else reading.evidence
    for folder, entries in folders.items():
        try:
            files = tree.find([name for name, *_ in entries], folder)
        except DataError as error:
            reading.lacks.append(str(error))
            continue
        for name, part, (height, width), objects in entries:
            inner = files[name]
            if inner is None:
                reading.broken[f'{folder}: {name}'] = 'there is no such picture'
            elif not reading.repeated(inner, folder):
                noted = all(str(side).isdecimal() for side in (height, width))
                image = dict(height=int(height), width=int(width)) if noted else {}
                reading.add(tree, inner, part or part_of(inner), objects, image=image)
    reading.notes += [f'{n} annotations are not read: {kind}' for kind, n in skipped.items() if n]
    reading.classes.sort()
    return reading
