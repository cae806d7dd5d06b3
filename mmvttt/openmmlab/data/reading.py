"""Record of a folder as one format reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        return {self.target, *(entry['category'] for entry in self.objects)} - {None}


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

    @property
    def explains(self) -> bool:
        """Whether the folder can be read so."""
        return bool(self.pictures) and not self.lacks

    @property
    def summary(self) -> str:
        """One line: the evidence for the format, and what is missing."""
        lacks = self.lacks or ([] if self.pictures else ['no picture is annotated'])
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

    def repeated(self, inner: str, source: str) -> bool:
        """Whether a picture has annotations already, which the format then lacks a choice of."""
        if inner in self.pictures:
            self.lacks.append(f'{source!r} annotates {inner!r}, which another file does: move one')
        return inner in self.pictures
