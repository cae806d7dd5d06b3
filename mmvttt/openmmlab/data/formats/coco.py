"""COCO's JSON, as CVAT, Roboflow and Label Studio export it: boxes, polygons and RLE."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any

from ..coco import coco_entries, is_box, is_id, runs_of, wrong_key
from ..findings import Findings
from ..reading import Reading
from ..text_files import read_json
from ..tree import Tree

# Annotations whose checks take seconds.
_MANY = 100_000
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
    if (count := len(content['annotations'])) >= _MANY:
        tree.say(f'  checks {count} annotations')
    entries = {key: [e if isinstance(e, dict) else {} for e in content[key]] for key in _LISTS}
    names = filter(None, map(_name, entries['images']))
    files = tree.find(names, str(path.parent), path.stem.rpartition('_')[2])
    _complete(tree, entries, files)
    _leave_out(reading, source, entries, files)
    images, annotations, categories = coco_entries(entries, findings)
    reading.notes += [f'{source}: {text}' for text in findings.warnings]
    reading.lacks += [f'{source!r}: {text}' for text in findings.errors]
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
    part = tree.part(path.stem) or tree.part(str(path.parent))
    for image in images:
        inner = files[image['file_name']]
        if inner is None or (inner not in added and reading.repeated(inner, source)):
            continue
        added.add(inner)
        entry = {k: v for k, v in image.items() if k != 'id' or not several}
        reading.add(tree, inner, part or tree.part(inner), objects[image['id']], image=entry)


def _name(image: dict) -> str:
    name = image.get('file_name')
    return name if isinstance(name, str) else ''


def _complete(tree: Tree, entries: dict[str, list[dict]], files: dict[str, str | None]) -> None:
    """Adds what some programs leave out, and what follows from the rest."""
    for category in entries['categories']:
        if type(category.get('name')) in (int, float):
            category['name'] = str(category['name'])
    for image in entries['images']:
        file = files.get(_name(image))
        if file and not (image.get('height') and image.get('width')):
            image.update(tree.size(file))
    for number, entry in enumerate(entries['annotations'], 1):
        box: Any = entry.get('bbox')
        entry.setdefault('id', number)
        if entry.get('area') is None:
            entry['area'] = math.prod(box[2:]) if is_box(box) else 0


def _leave_out(
    reading: Reading, source: str, entries: dict[str, list[dict]], files: dict[str, str | None]
) -> None:
    """Takes out images without a file, or with an annotation that cannot be read."""
    broken = {name: 'there is no such picture' for name, file in files.items() if file is None}
    whole = [image for image in entries['images'] if not wrong_key('images', image)]
    names = {image['id']: image['file_name'] for image in whole}
    sizes = {image['id']: (image['height'], image['width']) for image in whole}
    for entry in entries['annotations']:
        key = wrong_key('annotations', entry)
        if key is None and (size := sizes.get(entry['image_id'])):
            mask = entry.get('segmentation')
            key = 'segmentation' if isinstance(mask, dict) and runs_of(mask, size) is None else key
        if key not in (None, 'id', 'image_id') and (name := names.get(entry['image_id'])):
            broken.setdefault(name, f'{key} of annotation {entry["id"]} is {entry.get(key)!r:.80}')
            reading.left_out[files[name] or name] = 'its annotations cannot be read'
    reading.broken |= {f'{source}: {name}': why for name, why in broken.items()}
    entries['images'] = [i for i in entries['images'] if _name(i) not in broken]
    gone = {number for number, name in names.items() if name in broken}
    entries['annotations'] = [
        a for a in entries['annotations'] if not (is_id(k := a.get('image_id')) and k in gone)
    ]
