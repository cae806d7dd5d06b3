"""Label maps: for each picture another one of its size, with the numbers of the classes."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from PIL import Image

from mmvttt.pictures import ImageError, open_image
from mmvttt.text import listed

from ..images import decoded, spread
from ..reading import Reading
from ..text_files import read_lines
from ..tree import Tree, common_start
from .names import read_names

IGNORED = 255
# Classes without a list of names, above which numbers are rather levels of grey.
_MOST = 64
# Equal neighbours of a label map (.99), not of a photograph (.1 to .6); looked at in a few files.
_FLAT, _LOOKED_AT, _KINDS = 0.75, 5, 300
# Pixels of the largest file that is looked at.
_LARGEST = 180_000_000
# CamVid's label_colors.txt; CVAT's labelmap.txt, and tables of name, red, green and blue.
_THREE = r'(\d+)\s*[,\s]\s*(\d+)\s*[,\s]\s*(\d+)'
_COLOUR = re.compile(rf'{_THREE}\s*[,\s]\s*(\D.*)$|([^,]+?)\s*[:,]\s*{_THREE}\s*(:.*)?$')
_FIRST = re.compile(r'^[A-Za-z]+[_\-. ]')
_WORD = re.compile(r'^[A-Za-z]+(?=[_\-. ])|[_\-. ][A-Za-z]\w*?$')


@dataclass
class Pixels:
    """How often each number is in a label map, whether these are colours, and its form.

    The numbers of a `palette` mean something, unlike levels of grey.
    """

    counts: dict[int, int]
    coloured: bool
    palette: bool
    flat: float
    lossy: bool
    size: tuple[int, int]


def read_numbers(path: str | os.PathLike[str]) -> tuple[np.ndarray, Image.Image]:
    """The numbers `(H, W)` of an image, of colours 0xRRGGBB."""
    image, _ = open_image(path)
    if len(image.getbands()) > 2:
        channels = np.asarray(image.convert('RGB')).astype(np.int64)
        return channels @ np.array((65536, 256, 1)), image
    pixels = np.asarray(image)
    return (pixels if pixels.ndim == 2 else pixels[..., 0]).astype(np.int64), image


def _look(path: str) -> Pixels | None:
    """Summarizes the pixels of a label map; None if the file is not an image."""
    try:
        pixels, image = read_numbers(path)
    except ImageError:
        return None
    flat = float((pixels[:, 1:] == pixels[:, :-1]).mean()) if pixels.shape[1] > 1 else 0.0
    numbers, counts = np.unique(pixels, return_counts=True)
    size = pixels.shape[0], pixels.shape[1]
    each = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    coloured, palette = len(image.getbands()) > 2, image.mode == 'P'
    return Pixels(each, coloured, palette, flat, image.format == 'JPEG', size)


def read(tree: Tree) -> Reading:
    """Reads maps with the inner path of their picture, or with its name and a common ending."""
    reading = Reading('label maps', 'maps', sets='Segmentation')
    photos, maps = _kinds(tree)
    pairs = _pairs(tree, reading, photos, maps) if photos else {}
    if not pairs or reading.lacks:
        return reading
    paths = [tree.path(source) for source in pairs.values()]
    numbers: set[int] = set()
    coloured, lossy, palettes = set(), [], 0
    looks = decoded(_look, paths)
    for (inner, source), pixels in zip(pairs.items(), looks, strict=True):
        reading.used.add(source)
        if pixels is None:
            reading.broken[source] = 'it is not an image'
            reading.left_out[inner] = 'its label map cannot be read'
            continue
        numbers.update(pixels.counts)
        coloured.add(pixels.coloured)
        lossy += [source] * pixels.lossy
        palettes += pixels.palette
        image = dict(zip(('height', 'width'), pixels.size, strict=True))
        reading.add(tree, inner, tree.part(inner), (), image=image, target=tree.root / source)
    if lossy:
        reading.lacks.append(
            f'{len(lossy)} are JPEG, which changes the numbers ({lossy[0]}): write PNG'
        )
    elif len(coloured) > 1:
        reading.lacks.append('some are in colours, some in one channel: write all in one channel')
    elif numbers:
        _name(tree, reading, numbers, coloured == {True}, palettes == len(reading.pictures))
    return reading


def _kinds(tree: Tree) -> tuple[list[str], list[str]]:
    """Photographs and label maps, by a few pictures of each folder, suffix, and word in names."""
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for inner in tree.images:
        folder, _, name = inner.rpartition('/')
        stem, suffix = os.path.splitext(name)
        kinds[folder, suffix, '…'.join(_WORD.findall(stem))].append(inner)
    # Names of one word each are not kinds.
    words = Counter((folder, suffix) for folder, suffix, _ in kinds)
    merged: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (folder, suffix, word), images in kinds.items():
        merged[folder, suffix, word if words[folder, suffix] <= 8 else ''] += images
    # A set of a thousand classes has no maps for them.
    if len(merged) > _KINDS:
        return [], []
    each = min(_LOOKED_AT, max(1, _KINDS // len(merged))) if merged else 0
    # Greys of many levels are masks with soft edges if there is nothing but them and pictures.
    parts = {tree.part(folder) for folder, *_ in merged}
    numbers, colours, photos = [], [], []
    for images in merged.values():
        shown = [i for i in spread(images, each) if math.prod(tree.size(i).values()) < _LARGEST]
        looks = [_look(tree.path(inner)) for inner in shown]
        whole = [look for look in looks if look is not None]
        flat = float(np.median([look.flat for look in whole])) if whole else 0.0
        many = any(len(look.counts) > _MOST for look in whole)
        coloured = any(look.coloured for look in whole)
        if flat < _FLAT or (many and (coloured or len(merged) > 2 * len(parts))):
            photos += images
        elif coloured:
            colours += images
        else:
            numbers.append((many, images))
    if not photos:
        # Drawings in few colours, or radiographs, which have many levels of grey.
        photos = colours or [inner for many, images in numbers if many for inner in images]
        numbers = [(many, images) for many, images in numbers if colours or not many]
        colours = []
    return photos, [inner for _, images in numbers for inner in images] or colours


def _pairs(tree: Tree, reading: Reading, photos: list[str], maps: list[str]) -> dict[str, str]:
    """The map of each picture."""
    stems = {i: normalize('NFC', os.path.splitext(i)[0]).split('/') for i in tree.images}
    cores: dict[str, list[str]] = defaultdict(list)
    names = {inner: stems[inner][-1] for inner in (*photos, *maps)}
    ending = _shared_ending([names[inner] for inner in photos])
    starts = [_shared_ending([names[i][::-1] for i in images])[::-1] for images in (photos, maps)]
    for inner in photos:
        name = names[inner]
        cut = name.removesuffix(ending), name.removeprefix(starts[0]), _FIRST.sub('', name)
        for text in {name, *cut}:
            cores[text].append(inner)
    options: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    tree.facts([*photos, *maps])
    for source in maps:
        # The whole name, or without its last words, or without the first ones of all maps.
        name = names[source]
        cuts = [name[: match.start()] for match in re.finditer(r'[_\-. ]', name)]
        texts = (name, *cuts[::-1], name.removeprefix(starts[1]), _FIRST.sub('', name))
        core = next((text for text in texts if text in cores), None)
        if core is None:
            continue
        part = tree.part(source)
        near = {i: (tree.part(i) == part, _shared(stems[i], stems[source])) for i in cores[core]}
        best = [inner for inner, nearness in near.items() if nearness == max(near.values())]
        named = [inner for inner in best if {*inner.lower().split('/')} & {'images', 'jpegimages'}]
        inner, *others = named or best
        if tree.size(inner) != tree.size(source):
            reading.broken[source] = f'its size is not that of {inner!r}'
            continue
        if others:
            reading.lacks.append(f'{source!r} may be of {inner!r} or of {others[0]!r}')
            break
        options[inner][os.path.dirname(source), name.replace(core, '', 1)] = source
    paired = sum(map(len, options.values()))
    if paired or reading.broken or reading.lacks:
        reading.evidence = f'{paired} of {len(maps)} maps with a picture of their size'
        reading.lacks += [] if paired else [*reading.broken.values()][:1]
    several = next((kinds for kinds in options.values() if len(kinds) > 1), {})
    if several:
        # The format of VOC and CVAT: the others show objects, and drawings.
        chosen = {k for o in options.values() for k in o if 'SegmentationClass' in k[0].split('/')}
        if len(chosen & several.keys()) != 1:
            reading.lacks.append(f'a picture has several: {listed([*several.values()])}; move one')
        options = {i: {k: s for k, s in o.items() if k in chosen} for i, o in options.items()}
    return {inner: next(iter(kinds.values())) for inner, kinds in options.items() if kinds}


def _shared_ending(names: list[str]) -> str:
    """The ending that all names share, from a separator on."""
    length = common_start([name[::-1] for name in names]) if len(names) > 1 else 0
    start = re.search(r'[_\-. ]', names[0][len(names[0]) - length :]) if length else None
    return names[0][len(names[0]) - length + start.start() :] if start else ''


def _shared(one: list[str], other: list[str]) -> int:
    """The number of folders that two paths share from the root, and before their names."""
    one, other = one[:-1], other[:-1]
    first = common_start([one, other])
    one, other = one[first:], other[first:]
    return first + common_start([one[::-1], other[::-1]])


def _name(tree: Tree, reading: Reading, numbers: set[int], coloured: bool, palette: bool) -> None:
    """Finds the names of the numbers or colours in the maps."""
    lines = read_names(tree, reading)
    table = _colours(lines)
    for source in tree.having('.txt', '.csv') if coloured and not table else ():
        if table := _colours(tree.content(source, read_lines) or []):
            reading.used.add(source)
            break
    names = [*table] or [line for line in lines if not line.startswith('#')]
    names = [name or f'class {number}' for number, name in enumerate(names)]
    reading.named = bool(names)
    colours = {(r << 16) + (g << 8) + b: k for k, (r, g, b) in enumerate(table.values())}
    if coloured and numbers <= {*colours}:
        reading.classes, reading.lookup = names, colours
    elif coloured and any(n != (n & 255) * 0x10101 for n in numbers):
        reading.lacks.append(
            f'they are in {len(numbers)} colours, {len(numbers - {*colours})} without a name: '
            'write a line NAME:RED,GREEN,BLUE for each into labelmap.txt, or numbers into one '
            'channel'
        )
    else:
        if coloured:
            # Greys in three channels.
            reading.lookup = {n: n & 255 for n in numbers}
            numbers = {*reading.lookup.values()}
        _name_numbers(reading, numbers, names, palette)


def _name_numbers(reading: Reading, numbers: set[int], names: list[str], palette: bool) -> None:
    """Names the numbers of one channel, which must be fewer than a picture's greys."""
    if IGNORED in numbers and numbers <= {0, IGNORED}:
        reading.lookup = {n: int(n & 255 > 0) for n in reading.lookup or numbers}
        reading.classes = names if len(names) == 2 else ['background', *(names or ['object'])]
        reading.notes.append(f'255 in the masks is {reading.classes[-1]!r}, as 1 would be')
        if len(reading.classes) != 2:
            reading.lacks.append(f'{len(names)} names for masks of 0 and 255')
        return
    numbers = numbers - {IGNORED}
    most = max(numbers, default=0)
    if names and most >= len(names):
        reading.lacks.append(
            f'{len(names)} names ({listed(names)}), and numbers up to {most}: write the name of '
            'each number, from 0 (mostly the background) on'
        )
    elif most > IGNORED:
        reading.lacks.append(f'their numbers reach {most}: only 255 are read')
    elif most == 0:
        reading.lacks.append('they hold only the number 0: there is nothing to learn')
    elif not (names or palette) and (most >= _MOST or len(numbers) <= most / 2):
        reading.lacks.append(
            f'{len(numbers)} numbers from {min(numbers)} to {most} are rather levels of grey than '
            'numbers of classes (0, 1, …): write these, or name all in classes.txt'
        )
    if not names:
        reading.notes.append(
            f'no list names the numbers 0 to {most} of the maps: write it into classes.txt. They '
            'are learned as classes, which numbers of single objects (instances) are not'
        )
    reading.classes = names + [f'class {n}' for n in range(len(names), most + 1)]


def _colours(lines: list[str]) -> dict[str, list[int]]:
    """Names and colours in a text that has nothing else, but for a head and comments."""
    rows = [row for row in map(_COLOUR.match, lines) if row]
    if len(rows) < len([line for line in lines if line and line[0] != '#']) - 1:
        return {}
    return {row[4] or row[5]: [int(row[n] or row[n + 5]) for n in (1, 2, 3)] for row in rows}


def write_map(source: Path, target: Path, lookup: dict[Any, int]) -> None:
    """Writes a label map as 8 bits in one channel, with the numbers of the classes."""
    pixels, _ = read_numbers(source)
    if lookup:
        numbers = np.array(sorted(lookup))
        at = np.searchsorted(numbers, pixels).clip(max=len(numbers) - 1)
        classes = np.array([lookup[n] for n in numbers.tolist()])
        pixels = np.where(numbers[at] == pixels, classes[at], IGNORED)
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(target)
