"""Parts of a set: what names of folders and files say, and what is held out where none does."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

_WORDS = {
    **dict.fromkeys(('train', 'training', 'tr'), 'train'),
    **dict.fromkeys(('val', 'valid', 'validation', 'dev', 'eval', 'evaluation'), 'val'),
    **dict.fromkeys(('test', 'testing', 'ts'), 'test'),
}
# Words that may stand beside one of these: train_images, obj_train_data, instances_val2017.
_BESIDE = {
    *('set', 'data', 'dataset', 'obj', 'part', 'split', 'image', 'images', 'imgs', 'img', 'photos'),
    *('label', 'labels', 'annotation', 'annotations', 'instances', 'person', 'keypoints', 'coco'),
}
# The suffix that Roboflow gives the copies of a photograph.
_COPY = re.compile(r'(_(jpe?g|png|webp|bmp|tiff?))?\.rf\.[0-9a-zA-Z]+$')
_WORD = re.compile(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
_NUMBERED = re.compile(r'(.*?)(\d+)$')


def part_of(path: str) -> str:
    """'train', 'val', 'test' or '': the first of a path's components that is a part's name."""
    for name in path.split('/'):
        words = [word.lower() for word in _WORD.findall(name)]
        rest = [word for word in words if word not in _BESIDE]
        if len(rest) == 1 and rest[0] in _WORDS:
            return _WORDS[rest[0]]
    return ''


def parts_among(names: Iterable[str]) -> dict[str, str]:
    """The parts of names that differ in this word only, such as crops_train and crops_test."""
    alike: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in names:
        for match in _WORD.finditer(name):
            if part := _WORDS.get(match[0].lower()):
                alike[name[: match.start()], name[match.end() :]][name] = part
    groups = (group for group in alike.values() if len({*group.values()}) > 1)
    return {name: part for group in groups for name, part in group.items()}


def held_out(
    images: Sequence[str], classes: Sequence[Collection], twins: dict[str, str]
) -> set[str]:
    """About a fifth of the pictures, of each class, from their paths and the classes in each.

    Roboflow's copies of a photograph, and files with the same bytes (`twins`), stay together. So do
    neighbours in a sequence of numbered names, which may be frames of a video.
    """
    groups = _groups(images, twins)
    counts = Counter(name for names in classes for name in {*names})
    rarest: dict[str, object] = {}
    for block, members in groups.items():
        present = {name for number in members for name in classes[number]}
        rarest[block] = min(present, key=lambda name: (counts[name], str(name)), default=None)
    # A fifth of each class, or a block of every fifth picture where classes are too small.
    val = _fifth(groups, rarest, rarest)
    if len(val) <= len(images) / 10:
        val = _fifth(groups, dict.fromkeys(groups), rarest)
    if val or len(images) < 2:
        return {images[number] for number in val}
    # Few pictures: the last group, or where all belong together, the last of them.
    if len(groups) > 1 and len(groups[max(groups)]) <= len(images) / 2:
        return {images[number] for number in groups[max(groups)]}
    return held_out(images, classes, {}) if twins else {*images[-max(1, len(images) // 5) :]}


def _groups(images: Sequence[str], twins: dict[str, str]) -> dict[str, list[int]]:
    """The numbers of the pictures that stay together, by a name that sorts them."""
    sources = {inner: _COPY.sub('', os.path.splitext(inner)[0]) for inner in images}
    sequences: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for source in sources.values():
        if match := _NUMBERED.match(source):
            sequences[match[1]].add((int(match[2]), source))
    blocks: dict[str, str] = {}
    for name, frames in sequences.items():
        length = len(frames) // 10 if len(frames) >= 40 else min(4, round(len(frames) / 5))
        for number, (_, source) in enumerate(sorted(frames)):
            blocks[source] = f'{name} {number // max(1, length):06}'
    first: dict[str, str] = {}
    groups: dict[str, list[int]] = defaultdict(list)
    for number, inner in enumerate(images):
        source = sources[inner]
        block = first.setdefault(twins.get(inner, inner), blocks.get(source, source))
        groups[block].append(number)
    return groups


def _fifth(
    groups: dict[str, list[int]], kinds: dict[str, object], rarest: dict[str, object]
) -> set[int]:
    """Groups with about a fifth of the pictures of each kind, and not all of any `rarest` class."""
    left = Counter(rarest.values())
    seen: Counter[object] = Counter()
    held: Counter[object] = Counter()
    val = set()
    for block in sorted(groups):
        members, kind = groups[block], kinds[block]
        seen[kind] += len(members)
        fits = held[kind] + len(members) / 2 <= seen[kind] / 5
        if fits and left[rarest[block]] > 1:
            left[rarest[block]] -= 1
            held[kind] += len(members)
            val.update(members)
    return val
