"""COCO's JSON, as CVAT, Roboflow and Label Studio export it: boxes, polygons and RLE."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any

from ..coco import coco_entries
from ..findings import Findings
from ..parts import part_of
from ..reading import Reading
from ..text_files import read_json
from ..tree import Tree

_LISTS = ('images', 'annotations', 'categories')


def read(tree: Tree) -> Reading:
    """Reads each JSON with images, annotations with boxes, and categories."""
    reading = Reading('COCO')
    contents: dict[bool, dict[str, dict]] = {False: {}, True: {}}
    for source, content in tree.contents('.json', read_json):
        lists: dict[str, Any] = content if isinstance(content, dict) else {}
        missing = [k for k in _LISTS if not isinstance(lists.get(k), list)]
        if len(missing) > 1:
            continue
        boxes = [] if missing else [a for a in lists['annotations'] if _has_box(a)]
        if not missing and not lists['categories']:
            missing = ['categories']
        elif not missing and lists['annotations'] and not boxes:
            missing = ['boxes in its annotations']
        if missing:
            reading.evidence = f'{source!r} is like its JSON'
            reading.lacks = [f'it has no {missing[0]}']
        else:
            contents[any('keypoints' in a for a in boxes[:9])][source] = content
    # COCO's own folder annotates the same pictures for several tasks.
    chosen = contents[False] or contents[True]
    if not contents[False] and chosen:
        reading.notes.append('key points are not trained: only the boxes of persons are read')
    if chosen:
        reading.evidence, reading.lacks = f'{len(chosen)} JSON files', []
    for source, content in chosen.items():
        try:
            _add(tree, reading, source, content, len(chosen) > 1)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reading.lacks.append(f'{source!r} cannot be read ({type(error).__name__}: {error})')
    return reading


def _has_box(entry: Any) -> bool:
    return isinstance(entry, dict) and 'bbox' in entry and 'category_id' in entry


def _add(tree: Tree, reading: Reading, source: str, content: dict, several: bool) -> None:
    reading.used.add(source)
    path, findings = PurePosixPath(source), Findings(source)
    subset = path.stem.rpartition('_')[2]
    part = part_of(path.stem)
    names = [i['file_name'] for i in content['images'] if isinstance(i.get('file_name'), str)]
    files = tree.find(names, str(path.parent), subset)
    # Entries that some programs leave out, and that follow from the rest.
    for number, entry in enumerate(content['annotations'], 1):
        entry.setdefault('id', number)
        entry.setdefault('area', math.prod(entry.get('bbox', ())[2:]))
    for image in content['images']:
        file = files.get(image.get('file_name'))
        if file and not (image.get('height') and image.get('width')):
            image.update(tree.size(file))
    missing = {name for name, file in files.items() if file is None}
    reading.broken |= {f'{source}: {name}': 'there is no such picture' for name in missing}
    content['images'] = [i for i in content['images'] if i.get('file_name') not in missing]
    images, annotations, categories = coco_entries(content, findings)
    reading.lacks += [f'{source!r}: {text}' for text in findings.errors]
    reading.notes += [f'{source}: {text}' for text in findings.warnings]
    labels = {category['id']: category['name'] for category in categories}
    reading.classes += [name for name in labels.values() if name not in reading.classes]
    objects: dict[Any, list[dict]] = {image['id']: [] for image in images}
    for entry in annotations:
        item = entry | dict(category=labels[entry['category_id']])
        if several:
            # The ids of several files may be the same.
            del item['id']
        objects[entry['image_id']].append(item)
    added: set[str] = set()
    for image in images:
        inner = files[image['file_name']]
        if inner is None or (inner not in added and reading.repeated(inner, source)):
            continue
        added.add(inner)
        entry = {k: v for k, v in image.items() if k != 'id' or not several}
        where = part or part_of(str(path.parent)) or part_of(inner)
        reading.add(tree, inner, where, objects[image['id']], image=entry)
