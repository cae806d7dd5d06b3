"""A folder of pictures for each class: read where nothing annotates the pictures."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import PurePosixPath

from mmvttt.text import listed

from ..reading import Picture, Reading
from ..text_files import read_lines
from ..tree import TABLES, Tree, common_start

_NUMBERS = re.compile(r'(?:^|[,;\t ])-?[\d.]+(?=[,;\t ]|$)')
# Names of folders beside others of the same pictures, which no tool gives to a class.
_ROLES = {
    *('images', 'image', 'imgs', 'img', 'jpegimages', 'photos', 'labels', 'label', 'annotations'),
    *('annotation', 'masks', 'mask', 'segmentations', 'segmentation', 'segmentationclass', 'gt'),
    *('groundtruth', 'ground_truth', 'depth', 'predictions', 'visualization', 'visualizations'),
}


def read(tree: Tree) -> Reading:
    """Reads CLASS/…/PICTURE, below a part or above it, in a folder that may have others around."""
    reading = Reading('classes', 'classes')
    inside = {inner: inner.split('/') for inner in tree.images if '/' in inner}
    if not inside:
        return reading
    depth = common_start([parts[:-1] for parts in inside.values()])
    # A part may be the only one, and its pictures may lie in one class.
    common = next(iter(inside.values()))[:depth]
    depth = next((k for k, name in enumerate(common) if tree.part(name)), depth)
    names = {parts[depth] for parts in inside.values() if len(parts) > depth + 1}
    parted = bool(names) and all(map(tree.part, names))
    below = {parts[depth + 1] for parts in inside.values() if len(parts) > depth + 2}
    inner_parts = not parted and bool(below) and all(map(tree.part, below))
    # The folders inside of each class, or ''.
    folders: dict[str, set[str]] = defaultdict(set)
    for inner, parts in inside.items():
        rest = parts[depth + parted : -1]
        if not rest:
            reading.left_out[inner] = 'it lies in no folder of a class'
            continue
        part = parts[depth] if parted else rest[1] if inner_parts and len(rest) > 1 else ''
        reading.add(tree, inner, tree.part(part), (), target=rest[0])
        folders[rest[0]].add('/'.join(rest[1:]))
    if len(folders) < 2:
        reading.pictures.clear()
        return reading
    reading.classes = sorted(folders)
    reading.evidence = f'{len(folders)} folders of pictures'
    reading.doubts = _doubts(tree, folders) + _annotating(tree, reading.pictures)
    alike: dict[str, set[str]] = defaultdict(set)
    for inner, picture in reading.pictures.items():
        alike[picture.target].add(inner.rpartition('/')[2])
    first, *others = alike.values()
    if len(first) > 1 and all(names == first for names in others):
        text = f'each folder holds files of the same names ({listed(sorted(first), 2)})'
        if any(any(map(str.isdigit, name)) for name in first) or len(alike) <= len(first):
            reading.notes.append(f'{text}: are they of the same pictures?')
        else:
            reading.doubts.append(f'{text}: a folder for each picture')
    return reading


def _repeats(tree: Tree, source: str, classes: set[str]) -> bool:
    """Whether a file that names pictures says no more of them than a class and two numbers."""
    suffix = PurePosixPath(source).suffix.lower()
    is_table = suffix in ('.csv', '.tsv')
    if suffix in TABLES and not is_table:
        return False
    # A table has a head.
    for line in (tree.content(source, read_lines) or [''])[is_table:]:
        numbers = len(_NUMBERS.findall(line))
        cells = {*re.split(r'[,;\t/\\]', line)}
        # Other texts, such as licences, may say anything in words.
        agrees = not is_table or cells & classes or len(re.split('[,;\t]', line)) - numbers < 2
        if numbers > 2 or not agrees:
            return False
    return True


def _annotating(tree: Tree, pictures: dict[str, Picture]) -> list[str]:
    """Doubts about class folders, from files that may annotate their pictures."""
    classes = {picture.target for picture in pictures.values()}
    doubts = [
        f'{source!r} names the pictures, and may annotate them'
        for source in tree.naming(pictures)
        if not _repeats(tree, source, classes)
    ]
    texts = tree.having('.txt', *TABLES)
    beside = [text for text in texts if tree.has(PurePosixPath(text).stem)]
    if len(beside) > 1:
        doubts.append(f'{beside[0]!r} has the name of a picture, and may annotate it')
    if unread := [source for source in tree.left_out if source.endswith(('.json', '.xml'))]:
        doubts.append(f'{unread[0]!r}, which may annotate the pictures, cannot be read')
    return doubts


def _doubts(tree: Tree, folders: dict[str, set[str]]) -> list[str]:
    """Doubts about class folders, from the names of the folders and of those inside them."""
    doubts = []
    if len({tree.part(name) for name in folders} - {''}) > 1:
        doubts.append(
            f'some of {listed(sorted(folders), 4)} are parts of the data: give the folder that '
            'has only these'
        )
    if roles := [name for name in sorted(folders) if name.lower() in _ROLES]:
        doubts.append(f'the folder {roles[0]!r} is hardly a class')
    deep = [name for name, inner in folders.items() if len(inner) > 1 and '' not in inner]
    if flat := [name for name, inner in folders.items() if deep and inner == {''}]:
        doubts.append(
            f'{deep[0]!r} has {len(folders[deep[0]])} folders of pictures, and {flat[0]!r} none: '
            'give the one whose folders are the classes'
        )
    below = {name for inner in folders.values() for path in inner for name in path.split('/')}
    if len(roles := sorted(name for name in below if name.lower() in _ROLES)) > 1:
        doubts.append(f'its folders hold {listed(roles)}, of the same pictures')
    return doubts
