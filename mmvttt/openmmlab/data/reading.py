"""Record of a folder as one format reads it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmvttt.errors import DataError
from mmvttt.text import listed

from .tree import Tree


@dataclass
class Picture:
    """A picture, its part of the data or '', and what is annotated in it.

    `image` (its height and width) and `objects` are entries of `coco_json`, `target` is a class or
    the file of a label map. `inner` is its path in the folder.
    """

    path: Path
    part: str
    image: dict[str, Any] = field(default_factory=dict)
    objects: list[dict[str, Any]] = field(default_factory=list)
    target: Any = None
    inner: str = ''

    @property
    def classes(self) -> set[Any]:
        """The names of what is annotated in it, unless it has a label map."""
        names = {entry['category'] for entry in self.objects}
        return names | {self.target} if isinstance(self.target, str) else names


@dataclass
class Label:
    """A picture as a file names it, and (height, width) as annotated.

    Attributes:
        source: The file.
        name: The picture's path or name.
        objects: Entries of `coco_json`.
        scaled: Returns more of them, which are fractions of the picture, by its size.
        subset: The name of its part, below which the picture may lie, or ''.
        stem: The picture's name if there is none of `name`, or another label names it, too.
        fault: Why it cannot be read, or ''.
    """

    source: str
    name: str
    objects: list[dict[str, Any]] = field(default_factory=list)
    scaled: Callable[[dict[str, int]], list[dict[str, Any]]] | None = None
    size: tuple[Any, Any] = (0, 0)
    subset: str = ''
    stem: str = ''
    fault: str = ''


@dataclass
class Reading:
    """A folder as one format reads it: its `evidence` ('' for none) and what it lacks.

    Attributes:
        broken: Labels that cannot be read, with why; their pictures are left out.
        left_out: Pictures that are not used, with why.
        used: Annotations and lists that are read.
        listed: The pictures of each part, where the format's own files name them.
        sets: The folder below ImageSets whose lists count.
        lookup: Class numbers by the numbers (or colours) in label maps, if they are others.
        named: Whether a list names the numbers in label maps.
        doubts: What speaks against the format, unless it is asked for.
        skipped: How many annotations of each kind no training learns.
    """

    format: str
    task: str = 'boxes'
    evidence: str = ''
    lacks: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    pictures: dict[str, Picture] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    listed: dict[str, set[str]] = field(default_factory=dict)
    sets: str = ''
    lookup: dict[Any, int] = field(default_factory=dict)
    named: bool = False
    doubts: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def explains(self) -> bool:
        """Whether the folder can be read so."""
        return bool(self.pictures) and not self.lacks

    @property
    def summary(self) -> str:
        """One line: the evidence for the format, and what is missing."""
        faults = [f'{path}: {why}' for path, why in self.broken.items()]
        lacks = self.lacks or ([] if self.pictures else faults[:1] or ['no picture is annotated'])
        more = f' ({len(lacks)} such faults)' if len(lacks) > 2 else ''
        return '; '.join([self.evidence or 'nothing of it', *lacks[:2]]) + more

    def add(self, tree: Tree, inner: str, part: str, objects: Iterable[dict], **more: Any) -> None:
        """Adds objects to a picture, which is made at its first ones."""
        if inner not in self.pictures:
            self.pictures[inner] = Picture(tree.root / inner, part, inner=inner, **more)
        self.pictures[inner].objects += objects
        for name in (item['category'] for item in objects):
            if name not in self.classes:
                self.classes.append(name)

    def pair(self, tree: Tree, labels: Sequence[Label], what: str) -> None:
        """Adds what labels, which are called `what`, say of the pictures that they name."""
        classes, folders = self.classes[:], defaultdict[tuple[str, str], list[Label]](list)
        for label in labels:
            folders[label.source.rpartition('/')[0], label.subset].append(label)
        self.evidence = f'{len(labels)} {what}' if labels else self.evidence
        for place, members in folders.items():
            try:
                files = tree.find([label.name for label in members], *place)
                others = {label.stem for label in members} - {'', *files}
                stems = tree.find(sorted(others), *place)
            except DataError as error:
                self.lacks.append(str(error))
                continue
            tree.facts(filter(None, files.values()))
            counts = Counter(files[label.name] for label in members)
            for label in members:
                inner = files[label.name]
                self.used.add(label.source)
                # A copied label may have kept the name of another picture.
                if label.stem and (inner is None or counts[inner] > 1):
                    inner = stems.get(label.stem, inner)
                if inner is None:
                    key = label.source if label.stem else f'{label.source}: {label.name}'
                    self.broken[key] = f'there is no picture {label.name!r}, or more than one'
                elif self.repeated(inner, label.source):
                    continue
                elif label.fault:
                    self.broken[label.source] = label.fault
                    self.left_out[inner] = 'its label cannot be read'
                else:
                    sides = zip(('height', 'width'), map(_side, label.size), strict=True)
                    image = {side: value for side, value in sides if value}
                    part = tree.part(label.subset) or tree.part(inner)
                    more = label.scaled(tree.size(inner)) if label.scaled else []
                    self.add(tree, inner, part, label.objects + more, image=image)
        self.notes += [f'{n} annotations are not read: {k}' for k, n in self.skipped.items() if n]
        self.classes = classes or sorted(self.classes)

    def say_missing(self, source: str, lines: Sequence[str], images: Sequence[Any]) -> None:
        """Notes how many lines of a list name no picture: those whose `images` are None."""
        if missing := [line for line, image in zip(lines, images, strict=True) if image is None]:
            self.notes.append(
                f'{len(missing)} of {len(lines)} lines of {source} name no picture that is here: '
                f'{listed(missing, 2)}'
            )

    def repeated(self, inner: str, source: str) -> bool:
        """Whether a picture has annotations already, which the format then lacks a choice of."""
        if inner in self.pictures:
            self.lacks.append(f'{source!r} annotates {inner!r}, which another file does: move one')
        return inner in self.pictures


def _side(value: Any) -> int:
    """A length in pixels as a file has it, or 0."""
    try:
        return int(float(value or 0))
    except (TypeError, ValueError, OverflowError):
        return 0
