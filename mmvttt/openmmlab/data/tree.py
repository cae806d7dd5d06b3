"""The files of a folder: pictures, what their headers say, and which of them a name means."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote

from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import DataError
from mmvttt.pictures import SUFFIXES
from mmvttt.text import listed, one_line

from .contents import file_digest
from .images import decoded, glance
from .parts import part_of, parts_among
from .text_files import read_json

# A folder with this file is a work directory; mmengine's are called work_dirs.
MARK = 'mmvttt_pictures.json'
# Files of these are not looked into to see whether they are pictures of another suffix.
_TEXTS = (
    *('.txt', '.json', '.xml', '.yaml', '.yml', '.csv', '.md', '.names', '.data', '.labels'),
    '.zip',
)
# Files that may annotate pictures, and that speak of them.
TABLES = ('.csv', '.tsv', '.json', '.jsonl', '.manifest', '.xml', '.mat', '.npy', '.npz')
_DOCUMENTS = ('.md', '.rst', '.html', '.htm', '.ipynb', '.py')
# Bytes of a file, and pictures, that take seconds.
_LARGE, _MANY = 20 * 2**20, 2000
_MAGIC = b'\xff\xd8\xff', b'\x89PNG\r\n', b'BM', b'II*\0', b'MM\0*', b'GIF8', b'RIFF'
# Names of folders of pictures, beside folders of annotations.
_IMAGES = 'images', 'jpegimages', 'image', 'imgs', 'img'


class Tree:
    """The files below `root`, by their paths in it; links of folders are followed once.

    Attributes:
        files: All of them, but hidden ones and those of a work directory.
        images: Those that are pictures.
        left_out: Files that cannot be read, with why.
        say: Gets a line before what takes seconds.
    """

    def __init__(
        self,
        root: Path,
        work_dir: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.root, self.work_dir, self.say = root, work_dir, say
        self._top = os.fspath(root)
        self.left_out: dict[str, str] = {}
        self._contents: dict[str, Any] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._remembered: dict[str, Any] = {}
        if work_dir and (work_dir / MARK).is_file():
            with contextlib.suppress(DataError):
                self._remembered = read_json(work_dir / MARK) or {}
        self._linked: set[str] = set()
        self.has_links = False
        self.files = sorted(self._walk(''))
        self.images = [inner for inner in self.files if self._is_picture(inner)]
        self._parts: dict[str, tuple[str, ...]] = {}
        self._named: dict[str, list[str]] = defaultdict(list)
        self._exact: dict[str, str | None] = {}
        # Without regard to capitals.
        self._folded: dict[str, str | None] = {}
        for inner in self.images:
            self._parts[inner] = parts = tuple(normalize('NFC', inner).split('/'))
            for name in {parts[-1], os.path.splitext(parts[-1])[0]}:
                self._named[name].append(inner)
                where = '/'.join((*parts[:-1], name))
                # Two pictures of one stem: which of them is meant is not known.
                self._exact[where] = None if where in self._exact else inner
            where = '/'.join((*parts[:-1], parts[-1].casefold()))
            self._folded[where] = None if where in self._folded else inner
        self.folders = {parts[:-1] for parts in self._parts.values()}
        self._part_names = parts_among({name for folder in self.folders for name in folder})

    def path(self, inner: str) -> str:
        """The whole path of a file."""
        return f'{self._top}/{inner}'

    def _walk(self, folder: str) -> Iterable[str]:
        try:
            with os.scandir(self.path(folder)) as entries:
                listing = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.left_out[folder] = f'it cannot be opened ({error.strerror})'
            return
        if folder and any(entry.name == MARK for entry in listing):
            return
        work = os.fspath(self.work_dir) if self.work_dir else None
        for entry in listing:
            inner = f'{folder}/{entry.name}' if folder else entry.name
            self.has_links |= entry.is_symlink()
            if entry.name.startswith('.') or entry.name in ('__MACOSX', 'work_dirs'):
                continue
            if re.search('[\n\r\ud800-\udfff]', entry.name):
                self.left_out[inner] = 'its name is not UTF-8, or has a line break: rename it'
            elif entry.is_dir():
                if work == self.path(inner):
                    continue
                if entry.is_symlink():
                    target, here = map(os.path.realpath, (entry.path, self.path(folder)))
                    # A second time, or around in a circle.
                    if target in self._linked or f'{here}/'.startswith(f'{target}/'):
                        continue
                    self._linked.add(target)
                yield from self._walk(inner)
            elif entry.is_file():
                yield inner
            else:
                self.left_out[inner] = 'it is no file: a link that leads nowhere, say'

    def _is_picture(self, inner: str) -> bool:
        suffix = os.path.splitext(inner)[1].lower()
        if suffix in SUFFIXES or suffix in _TEXTS:
            return suffix in SUFFIXES
        try:
            with open(self.path(inner), 'rb') as file:
                return file.read(8).startswith(_MAGIC)
        except OSError:
            return False

    def content(self, inner: str, read: Callable[[str], Any]) -> Any:
        """Calls `read` on a file once; None if it raises a DataError, which is noted."""
        if inner not in self._contents:
            if (size := os.path.getsize(self.path(inner))) > _LARGE:
                self.say(f'  reads {one_line(inner)}, {size / 1e6:.0f} MB')
            try:
                self._contents[inner] = read(self.path(inner))
            except DataError as error:
                self._contents[inner] = None
                self.left_out[inner] = str(error)
        return self._contents[inner]

    def contents(self, suffix: str, read: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """The files that end so, each with what `read` makes of it, see `content`."""
        for source in self.having(suffix):
            if (content := self.content(source, read)) is not None:
                yield source, content

    def has(self, name: str) -> bool:
        """Whether a picture has this name or stem."""
        return any(normalize('NFC', text) in self._named for text in (name, unquote(name)))

    def part(self, path: str) -> str:
        """'train', 'val', 'test' or '', by names of parts, or by what folders' names differ in."""
        names = (self._part_names.get(name) or part_of(name) for name in path.split('/'))
        return next(filter(None, names), '')

    def is_image(self, inner: str | None) -> bool:
        """Whether a file is one of the pictures."""
        return inner in self._parts

    def having(self, *suffixes: str) -> list[str]:
        """The files whose names end so."""
        return [inner for inner in self.files if inner.lower().endswith(suffixes)]

    def naming(self, images: Iterable[str]) -> list[str]:
        """The files that name several of some pictures, in their first 64 KiB."""
        names, sources = {self._parts[inner][-1] for inner in images}, []
        for source in self.files:
            if self.is_image(source) or source.lower().endswith(_DOCUMENTS):
                continue
            try:
                with open(self.path(source), 'rb') as file:
                    text = file.read(2**16).decode(errors='replace')
            except OSError as error:
                self.left_out[source] = f'it cannot be opened ({error.strerror})'
                continue
            if len(names & {*re.split(r'[\s"\',;:<>/|]+', text)}) > 1:
                sources.append(source)
        return sources

    def bases(self, folder: str, subset: str = '') -> list[str]:
        """Where formats have the pictures of annotations in `folder`, as far as there are any.

        In it; in `images` or the `subset` (COCO's train2017) in the place of one of its components,
        or inside of one of them.
        """
        parts = _components(folder)
        places = [parts]
        lower = {tuple(map(str.lower, known)): known for known in self.folders}
        for k in range(len(parts), -1, -1):
            for word in (*_IMAGES, *([subset.lower()] if subset else [])):
                before = parts[:k]
                places += [(*before, word, *parts[k + 1 :]), (*before, word)]
                places += [(*before, word, subset), (*before, subset, word)] if subset else []
            places.append(parts[:k])
        known = (lower.get(tuple(map(str.lower, place))) for place in places)
        return list(dict.fromkeys('/'.join(place) for place in known if place is not None))

    def find(self, names: Iterable[str], folder: str, subset: str = '') -> dict[str, str | None]:
        """The pictures that names in a folder's annotations mean, by whole components of paths.

        They lie in one of `bases`; else all in one other folder, or each name is there only once. A
        path may begin on another machine. Raises DataError if several folders have them.
        """
        parts = {name: _components(name) for name in names}
        shared, bases = common_start([p[:-1] for p in parts.values()]), self.bases(folder, subset)
        for start in range(shared + 1):
            paths = {name: path[start:] for name, path in parts.items()}
            inside = [
                {name: self._at(base, path) for name, path in paths.items()} for base in bases
            ]
            best = max(inside, key=lambda pictures: sum(map(bool, pictures.values())), default={})
            if any(best.values()):
                return best
            places = {name: self._ending(path) for name, path in paths.items()}
            if any(places.values()):
                break
        counts = Counter(base for options in places.values() for base in options)
        part = self.part(subset) or self.part(folder)
        same = [base for base in counts if part and self.part(base) == part] or list(counts)
        bases = [base for base in same if counts[base] == len(places)] or same
        if len(bases) > 1 and any(sum(b in o for b in bases) > 1 for o in places.values()):
            raise DataError(
                f'the pictures of {folder or "."!r} may be in any of the folders '
                f'{listed(sorted(bases))}: call one of them images'
            )
        return {name: next((p[b] for b in bases if b in p), None) for name, p in places.items()}

    def _at(self, base: str, path: tuple[str, ...]) -> str | None:
        """The picture at a path in a folder, without its suffix if need be."""
        inner = '/'.join((base, *path) if base else path)
        folded = '/'.join((*inner.split('/')[:-1], path[-1].casefold())) if path else ''
        return self._exact.get(inner) or self._exact.get(unquote(inner)) or self._folded.get(folded)

    def _ending(self, path: tuple[str, ...]) -> dict[str, str | None]:
        """Pictures whose path ends so, by the folder before that; None if there are two in it."""
        options: dict[str, str | None] = {}
        for parts in dict.fromkeys((path, tuple(map(unquote, path)))) if path else ():
            for inner in self._named.get(parts[-1], ()):
                known, length = self._parts[inner], len(parts)
                if known[-length:-1] == parts[:-1]:
                    base = '/'.join(known[:-length])
                    options[base] = None if base in options else inner
            if options:
                break
        return options

    def locate(self, entry: str, folder: str) -> str | None:
        """The file or folder of a list's entry, seen from the list's folder or the root."""
        if not (parts := _components(entry)):
            return folder
        for start in range(len(parts)):
            for base in dict.fromkeys((folder, '')):
                inner = '/'.join([*filter(None, [base]), *parts[start:]])
                if os.path.exists(self.path(inner)):
                    return inner
        return None

    def named(self, line: str, among: Container[str], source: str) -> str | None:
        """The picture whose path ends as a list's line, or as its first word.

        Of several it is the one that shares most folders with the list.
        """
        near = source.split('/')[:-1]
        for text in dict.fromkeys((line, line.split()[0])):
            parts = _components(text)
            for start in range(len(parts)):
                options: dict[int, list[str]] = defaultdict(list)
                for inner in self._ending(parts[start:]).values():
                    if inner and inner in among:
                        options[common_start([near, inner.split('/')])].append(inner)
                if options and len(best := options[max(options)]) == 1:
                    return best[0]
        return None

    def facts(self, images: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Size and `problem` of pictures, remembered by path, size and time in the work folder."""
        new = []
        for inner in dict.fromkeys(images):
            if inner not in self._facts:
                state = os.stat(self.path(inner))
                key = [state.st_size, state.st_mtime_ns, state.st_ino]
                entry = self._remembered.get(self.path(inner))
                if not isinstance(entry, dict) or entry.get('key') != key:
                    new.append(inner)
                    entry = dict(key=key)
                self._facts[inner] = entry
        paths = list(map(self.path, new))
        if len(new) >= _MANY:
            self.say(f'  opens {len(new)} pictures')
        looks = decoded(glance, paths, len(new) >= _MANY) if new else ()
        for inner, seen in zip(new, looks, strict=True):
            height, width = seen.size or (0, 0)
            problem = seen.problem or (None if seen.size else 'too large images')
            self._facts[inner].update(height=height, width=width, problem=problem)
        return self._facts

    def copies(self, images: Iterable[str]) -> dict[str, str]:
        """For each picture the first of those with the same bytes."""
        facts = self.facts(images := list(images))
        sizes = Counter(facts[inner]['key'][0] for inner in images)
        first: dict[Any, str] = {}
        for inner in images:
            entry = facts[inner]
            if sizes[entry['key'][0]] > 1 and 'digest' not in entry:
                entry['digest'] = file_digest(self.path(inner))
        return {i: first.setdefault(facts[i].get('digest', i), i) for i in images}

    def remember(self) -> None:
        """Writes the facts into the work directory, if there is one, for the next time."""
        facts = self._remembered | {self.path(inner): entry for inner, entry in self._facts.items()}
        if self.work_dir and facts != self._remembered:
            with replacing(self.work_dir / MARK) as partial:
                partial.write_text(json.dumps(facts), encoding='utf-8')

    def size(self, inner: str) -> dict[str, int]:
        """Height and width of a picture, upright; 0 if it cannot be read."""
        entry = self._facts.get(inner) or self.facts([inner])[inner]
        return dict(height=entry['height'], width=entry['width'])


def common_start(paths: Sequence[Sequence[str]]) -> int:
    """The number of components with which all paths begin."""
    steps = enumerate(zip(*paths, strict=False))
    shortest = min(map(len, paths), default=0)
    return next((k for k, step in steps if len({*step}) > 1), shortest)


def _components(path: str) -> tuple[str, ...]:
    parts: Sequence[str] = normalize('NFC', path).replace('\\', '/').split('/')
    return tuple(part for part in parts if part not in ('', '.', '..'))
