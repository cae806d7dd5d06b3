"""Reads a folder of annotated pictures: one format explains it, and every file is accounted for."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import Any

from mmvttt.arguments import check_choice
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import DataError
from mmvttt.pictures import SUFFIXES, open_image
from mmvttt.text import listed, shown

from .coco import check_conventions, check_fractions
from .findings import Findings
from .formats import ANNOTATIONS, FORMATS
from .formats.maps import write_map
from .parts import held_out, part_of
from .reading import Picture, Reading
from .text_files import read_lines
from .tree import MARK, TABLES, Tree
from .write_coco import coco_json

# The share of pictures that may be left out because they or their labels cannot be read; one may.
_BROKEN = 0.1
_SIDES = 'height', 'width'
# The part of a box in its picture, below which its numbers are rather others: corners taken for
# centres have .63, an object that is cut off at the edge .75.
_INSIDE = 0.7


@dataclass
class OwnFolder:
    """The annotated pictures of a folder.

    Attributes:
        root: The folder, or where a ZIP file was unpacked.
        format: One of `formats.FORMATS` in words, e.g. 'COCO'.
        task: 'boxes', 'masks', 'maps' or 'classes'.
        classes: Their names: any text.
        train: Pictures to train.
        val: Pictures to validate.
        split: Whether the validation part was held out here, because the folder has none.
        notes: Sentences for the reader of a report.
        left_out: Paths in the folder that are not used, each with the reason.
        lookup: Class numbers by the numbers in the label maps, if they are others.
    """

    root: Path
    format: str = ''
    task: str = ''
    classes: tuple[str, ...] = ()
    train: list[Picture] = field(default_factory=list)
    val: list[Picture] = field(default_factory=list)
    split: bool = False
    notes: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    lookup: dict[Any, int] = field(default_factory=dict)


def read_folder(
    root: str | os.PathLike[str],
    format: str | None = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> OwnFolder:
    """Reads a folder or a ZIP file; without a validation part, a fifth is held out by groups.

    Args:
        root: The folder.
        format: One of `formats.FORMATS`, where several would explain the folder.
        work_dir: No data; what pictures' headers say is remembered in it.
        say: Gets a line before each step that takes seconds.

    Raises:
        DataError: None or several of the formats explain it, or more than a tenth of the pictures
            or labels cannot be read.
        UsageError: There is no such format.
    """
    root = Path(root)
    work = Path(work_dir).resolve() if work_dir else None
    if format is not None:
        check_choice('format', format, tuple(FORMATS))
    if root.is_file():
        root = _unpacked(root, work)
    if not root.is_dir():
        raise DataError(f'there is no folder {shown(root)!r}')
    tree = Tree(root, work, say)
    reading = _chosen(tree, format)
    pictures, copied = _usable(tree, reading)
    if reading.task == 'boxes':
        _check_boxes(reading, pictures)
    data = OwnFolder(root, reading.format, reading.task, notes=reading.notes)
    _divide(data, _set_parts(tree, reading, pictures), copied)
    _settle(data, reading)
    _account(data, tree, reading)
    return data


def _chosen(tree: Tree, format: str | None) -> Reading:
    """Returns the reading of the one format that explains the folder."""
    readings = {name: FORMATS[name](tree) for name in ([format] if format else ANNOTATIONS)}
    if not format:
        maps = FORMATS['maps'](tree)
        # Maps whose numbers have no names are what remains of pictures annotated otherwise.
        if maps.named or not any(r.explains for r in readings.values()):
            others = [r for r in readings.values() if r.evidence and not maps.named]
            maps.doubts += [f'{r.format} comes near: {r.summary}' for r in others]
            readings['maps'] = maps
        if not any(r.evidence for r in readings.values()):
            readings['classes'] = FORMATS['classes'](tree)
        for reading in readings.values():
            reading.lacks += reading.doubts
    explain = {name: reading for name, reading in readings.items() if reading.explains}
    if len(explain) == 1:
        return next(iter(explain.values()))
    # An error lists what each format has found, and what it lacks.
    near = explain or {name: r for name, r in readings.items() if r.evidence or format}
    texts = [f'{r.format} (--format {name}): {r.summary}' for name, r in near.items()]
    texts = texts or _beside(tree)
    what = 'is explained by several formats' if explain else 'is in none of the formats'
    raise DataError(
        f'{shown(tree.root)!r} {what} that are read ({", ".join(FORMATS)}): '
        + shown('. '.join(texts))
    )


def _beside(tree: Tree) -> list[str]:
    """Says what there is in a folder of which no format finds anything."""
    texts = [
        f'no format is that of its {len(tree.images)} pictures ({_suffixes(tree.files)}): '
        'nothing annotates them, and they lie in fewer than two folders'
    ]
    if not tree.images:
        texts = [f'it has no pictures, only {_suffixes(tree.files) or "nothing"}']
    elif lists := tree.naming(tree.images) or tree.having(*TABLES):
        texts.append(f'{lists[0]!r} may annotate them: export COCO, YOLO or Pascal VOC')
    if archives := tree.having('.zip', '.tar', '.gz', '.7z', '.rar'):
        texts.append(f'{archives[0]!r} is packed: unpack it')
    return texts + [f'{path!r}: {why}' for path, why in [*tree.left_out.items()][:2]]


def _usable(tree: Tree, reading: Reading) -> tuple[dict[str, Picture], dict[str, str]]:
    """The pictures that can be read and are as large as annotated, and of each its first copy."""
    broken, facts = dict(reading.broken), tree.facts(reading.pictures)
    for inner, picture in reading.pictures.items():
        size, noted = tree.size(inner), {k: int(picture.image.get(k) or 0) for k in _SIDES}
        if problem := facts[inner]['problem']:
            broken[inner] = f'it is among the {problem}'
        elif all(noted.values()) and noted != size:
            texts = (f'{s["width"]}x{s["height"]}' for s in (noted, size))
            turned = [*noted.values()] == [*size.values()][::-1]
            broken[inner] = 'its size is annotated as {}, and it has {}{}'.format(
                *texts, ', turned by EXIF perhaps' if turned else ''
            )
        picture.image.update(size)
    pictures = {inner: p for inner, p in reading.pictures.items() if inner not in broken}
    broken |= {path: why for path, why in tree.left_out.items() if path.lower().endswith(SUFFIXES)}
    reading.left_out |= broken
    faults = [f'{path}: {why}' for path, why in broken.items()]
    total = len(pictures) + len(broken)
    if len(broken) > max(1, _BROKEN * total):
        more = f', … ({len(faults) - 5} more)' if len(faults) > 5 else ''
        raise DataError(
            f'{len(broken)} of {total} pictures or labels ({reading.format}) cannot be read: '
            f'{shown("; ".join(faults[:5]), 1200)}{more}. Correct them, or move them out of '
            f'{shown(tree.root)!r}'
        )
    # The same file by two ways of links, and files of the same bytes.
    real: dict[str, str] = {}
    paths = {i: os.path.realpath(tree.path(i)) for i in pictures if tree.has_links}
    for inner in sorted(paths, key=lambda inner: not paths[inner].endswith(f'/{inner}')):
        if real.setdefault(paths[inner], inner) != inner:
            reading.left_out[inner] = 'it is another one of these by a link'
            del pictures[inner]
    copied = tree.copies(pictures)
    tree.remember()
    return pictures, copied


def _check_boxes(reading: Reading, pictures: dict[str, Picture]) -> None:
    """Raises DataError if most boxes cannot be where the format's numbers say."""
    findings = Findings(reading.format)
    sizes = {i: (p.image['height'], p.image['width']) for i, p in pictures.items()}
    boxes = [o | dict(id=i, image_id=i) for i, p in pictures.items() for o in p.objects]
    reason = (
        f'{reading.format} has other numbers for boxes (are they corners, centres, pixels or '
        'fractions?), or the pictures were resized'
    )
    if reading.format != 'YOLO':
        check_fractions(boxes, findings)
    if reading.format == 'COCO':
        check_conventions(boxes, sizes, findings, reason)
    elif far := [box for box in boxes if _inside(box['bbox'], sizes[box['image_id']]) < _INSIDE]:
        text = f'{len(far)} × boxes that reach beyond their image ({far[0]["image_id"]})'
        if len(far) > len(boxes) / 2:
            findings.error(f'{text}: {reason}')
        reading.notes.append(text)
    if findings.errors:
        raise DataError(f'{reading.format}: {findings.errors[0]}')
    reading.notes += findings.warnings


def _inside(box: Sequence[float], size: tuple[int, int]) -> float:
    """The part of a box, x, y, width and height, that lies in a picture of height and width."""
    x, y, width, height = box
    across, down = min(x + width, size[1]) - max(x, 0), min(y + height, size[0]) - max(y, 0)
    return max(across, 0) * max(down, 0) / (width * height) if width * height > 0 else 1


def _set_parts(tree: Tree, reading: Reading, pictures: dict[str, Picture]) -> list[Picture]:
    """Sets the parts by lists, else by names; returns the pictures of parts to train or validate.

    Without any part these are all pictures, whose part is ''.
    """
    listing = reading.listed or _lists(tree, reading, pictures)
    if listing:
        train, val = listing.get('train', set()), listing.get('val', set())
        if not val and 'val' not in reading.listed:
            val = {inner for inner, p in pictures.items() if p.part == 'val'} - train
        # Where all that are trained are validated, a part is held out.
        if train - val and train & val:
            reading.notes.append(
                f'{len(train & val)} pictures are listed to train and to validate, and are only '
                f'validated: {listed(sorted(train & val), 2)}'
            )
        listing |= dict(train=train - val, val=val) if train - val else dict(train=val, val=set())
        for inner, picture in pictures.items():
            parts = (p for p in ('val', 'train', 'test') if inner in listing.get(p, ()))
            picture.part = next(parts, '')
    parted = bool(listing) or bool({'train', 'val'} & {p.part for p in pictures.values()})
    for inner, picture in pictures.items():
        if parted and not picture.part:
            why = 'no list names it' if listing else 'it is in none of the parts'
            reading.left_out.setdefault(inner, why)
        elif picture.part == 'test':
            reading.left_out.setdefault(inner, 'it is in the test part')
    return [p for p in pictures.values() if p.part != 'test' and (p.part or not parted)]


def _divide(data: OwnFolder, pictures: list[Picture], copied: dict[str, str]) -> None:
    """Sets the pictures to train and to validate; without a part of one kind, a fifth is held out.

    `copied` has for each picture the first one with the same bytes.
    """
    data.val = [p for p in pictures if p.part == 'val']
    data.train = [p for p in pictures if p.part != 'val']
    if not data.val or not data.train:
        pictures = sorted(pictures, key=lambda picture: picture.inner)
        val = held_out([p.inner for p in pictures], [p.classes for p in pictures], copied)
        data.train = [p for p in pictures if p.inner not in val]
        data.val, data.split = [p for p in pictures if p.inner in val], True
        data.notes.append(
            f'no validation part: {len(data.val)} of {len(pictures)} pictures are held out, about '
            'a fifth of each class; copies of a picture and neighbouring frames stay together'
        )
    learned = {copied[p.inner] for p in data.train}
    if both := [p.inner for p in data.val if copied[p.inner] in learned]:
        data.notes.append(
            f'{len(both)} pictures to validate are the same files as some to train, so that their '
            f'results say nothing about others: {listed(both, 3)}'
        )
    if data.task != 'maps' and (unlike := _contradictions([*data.train, *data.val], copied)):
        data.notes.append(
            f'{len(unlike)} pictures are the same file twice with different annotations, which '
            f'contradict each other: {listed(unlike[0], 2)}'
        )


def _contradictions(pictures: list[Picture], copied: dict[str, str]) -> list[list[str]]:
    """Paths of the same file, one for each of several ways in which it is annotated."""
    meanings: dict[str, dict[str, str]] = defaultdict(dict)
    counts = Counter(copied.values())
    for picture in pictures:
        if counts[first := copied[picture.inner]] > 1:
            boxes = sorted((o['category'], list(map(round, o['bbox']))) for o in picture.objects)
            meanings[first].setdefault(repr(boxes or picture.target), picture.inner)
    return [list(inners.values()) for inners in meanings.values() if len(inners) > 1]


def _lists(tree: Tree, reading: Reading, pictures: dict[str, Picture]) -> dict[str, set[str]]:
    """The pictures of each part in lists such as train.txt or ImageSets/Main/val.txt."""
    lists: dict[str, set[str]] = defaultdict(set)
    for source in tree.having('.txt'):
        *folders, name = source.split('/')
        other = 'ImageSets' in folders and folders[-1] != (reading.sets or folders[-1])
        if not (part := part_of(name[:-4])) or other or source in reading.used:
            continue
        lines = tree.content(source, read_lines) or []
        named = [tree.named(line, pictures, source) for line in lines]
        # Another text may name a picture by chance.
        if sum(map(bool, named)) > (0 if 'ImageSets' in folders else len(named) / 2):
            lists[part] |= {inner for inner in named if inner}
            reading.used.add(source)
            reading.say_missing(source, lines, named)
    return lists


def _settle(data: OwnFolder, reading: Reading) -> None:
    """Sets task and classes by what is annotated; raises DataError if there is too little."""
    pictures, classes = [*data.train, *data.val], reading.classes
    if data.task == 'boxes':
        objects = [o for p in pictures for o in p.objects if not o.get('iscrowd')]
        masks = sum(bool(o.get('segmentation')) for o in objects)
        data.task = 'masks' if 0 < masks == len(objects) else 'boxes'
        if 0 < masks < len(objects):
            data.notes.append(
                f'only {masks} of {len(objects)} objects have a mask: boxes are trained'
            )
        present = {o['category'] for p in pictures for o in p.objects}
        if absent := [name for name in classes if name not in present]:
            data.notes.append(f'classes without an object are left out: {listed(absent)}')
    else:
        present = {p.target for p in pictures}
    if data.task != 'maps':
        classes = [name for name in classes if name in present]
        learned = {name for p in data.train for name in p.classes}
        if unseen := [name for name in classes if name not in learned]:
            data.notes.append(
                f'classes of which no picture is trained, only validated: {listed(unseen)}'
            )
    if breaks := [name for name in classes if len(name.splitlines()) > 1]:
        raise DataError(
            f'names of classes have line breaks, which tables and lists cannot have: '
            f'{listed(breaks)}; rename them'
        )
    data.classes, data.lookup = tuple(classes), reading.lookup
    if not classes or not data.train or not data.val:
        faults = [f'{path}: {why}' for path, why in reading.broken.items()]
        raise DataError(
            f'{shown(data.root)!r} ({data.format}) needs pictures to train (there are '
            f'{len(data.train)}), pictures to validate ({len(data.val)}), and annotated classes '
            f'({len(classes)}). {shown("; ".join([*faults[:3], *data.notes[:3]]), 900)}'
        )


def _account(data: OwnFolder, tree: Tree, reading: Reading) -> None:
    """Says of every file that is neither a picture of the data nor read why it is left out."""
    used = {p.inner for p in [*data.train, *data.val]} | (reading.used - {*reading.broken})
    kinds = {True: 'nothing annotates it', False: 'nothing reads it'}
    reasons = {inner: kinds[tree.is_image(inner)] for inner in tree.files}
    reasons |= tree.left_out | reading.left_out
    data.left_out = sorted((inner, why) for inner, why in reasons.items() if inner not in used)
    groups: dict[str, list[str]] = defaultdict(list)
    for inner, why in data.left_out:
        groups[why].append(inner)
    data.notes += [
        f'left out: {_suffixes(inners)}, {why}: {listed(inners, 2)}'
        for why, inners in sorted(groups.items(), key=lambda item: -len(item[1]))[:12]
    ]
    data.notes = [shown(note, 400) for note in data.notes]


def _suffixes(files: list[str]) -> str:
    counts = Counter(os.path.splitext(inner)[1] or 'no suffix' for inner in files)
    return ', '.join(f'{count} × {shown(suffix, 20)}' for suffix, count in counts.most_common(4))


def _unpacked(archive: Path, work_dir: Path | None) -> Path:
    """Unpacks a ZIP file into the work directory, or into a folder of the system's for files."""
    state = archive.stat()
    name = f'{archive.stem}_{state.st_size:x}_{state.st_mtime_ns:x}'
    base = work_dir or Path(tempfile.gettempdir(), f'mmvttt_{os.getuid()}')
    target = base / 'unpacked' / name
    advice = f'unpack {os.fspath(archive)!r} yourself, and give the folder'
    try:
        base.mkdir(0o700 if work_dir is None else 0o777, parents=True, exist_ok=True)
        owner = os.lstat(base).st_uid
    except OSError as error:
        raise DataError(f'{os.fspath(base)!r} cannot be written ({error}): {advice}') from error
    # Others may write into the system's folder for files, too.
    if work_dir is None and owner != os.getuid():
        raise DataError(f'{os.fspath(base)!r} belongs to another user: {advice}')
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=base) as partial:
        try:
            with zipfile.ZipFile(archive) as file:
                size = sum(entry.file_size for entry in file.infolist())
                free = disk_usage(base).free
                if size > free / 2 or size > 200 * state.st_size + 2**20:
                    raise DataError(f'it would unpack to {size} bytes, and {free} are free')
                file.extractall(partial)
            target.parent.mkdir(exist_ok=True)
            os.replace(partial, target)
        except Exception as error:
            # Each compression has its own errors. Another process may have been faster.
            if not target.is_dir():
                raise DataError(f'it cannot be unpacked ({error}): {advice}') from error
    return target


def as_plan(data: OwnFolder) -> dict[str, Any]:
    """Converts a folder that was read to types that JSON has.

    `pictures` have a `path` in the folder, a `part` ('train' or 'val'), and by the task `objects`
    (`class`, `bbox` as [x, y, width, height] in pixels, `mask`), a `class`, or a `map`: the file of
    one channel with the numbers of `classes`. One that is written for it lasts as long as the
    program.
    """
    pictures = []
    folder = None
    for part, members in (('train', data.train), ('val', data.val)):
        for p in members:
            entry: dict[str, Any] = dict(path=p.inner, part=part)
            entry |= {side: p.image[side] for side in _SIDES}
            if data.task == 'classes':
                entry['class'] = p.target
            elif data.task == 'maps':
                entry['map'] = os.fspath(p.target)
                if _converts(data, p):
                    if folder is None:
                        folder = Path(tempfile.mkdtemp(prefix='mmvttt_maps_'))
                        atexit.register(shutil.rmtree, folder, ignore_errors=True)
                    entry['map'] = os.fspath(folder / f'{p.inner}.png')
                    write_map(p.target, Path(entry['map']), data.lookup)
            else:
                entry['objects'] = [
                    {'class': o['category'], 'bbox': o['bbox'], 'mask': bool(o.get('segmentation'))}
                    for o in p.objects
                ]
            pictures.append(entry)
    return dict(
        root=os.fspath(data.root), format=data.format, task=data.task, classes=list(data.classes),
        pictures=pictures, split=data.split, notes=list(data.notes),
        left_out=[dict(path=path, why=why) for path, why in data.left_out],
    )  # fmt: skip


def _converts(data: OwnFolder, picture: Picture) -> bool:
    """Whether a label map is not yet 8 bits of one channel with the numbers of the classes."""
    if data.lookup or picture.target.suffix.lower() != '.png':
        return True
    return open_image(picture.target)[0].mode not in ('L', 'P')


def write_lists(data: OwnFolder, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Writes the list of each part, for boxes and masks as COCO's JSON; yields its arguments.

    Label maps are copied, because mmsegmentation needs one folder with the pictures' names.
    """
    out.mkdir(parents=True, exist_ok=True)
    # A folder inside of the data is not read as data.
    (out / MARK).touch()
    for part, pictures in (('train', data.train), ('val', data.val)):
        # Lists are read without the spaces around their lines.
        names = [p.inner if p.inner == p.inner.strip() else f'./{p.inner}' for p in pictures]
        path, text = out / f'{part}.txt', '\n'.join(names)
        arguments: dict[str, Any] = dict(data_prefix='')
        if data.task == 'classes':
            labels = {name: number for number, name in enumerate(data.classes)}
            pairs = zip(names, pictures, strict=True)
            text = '\n'.join(f'{name} {labels[p.target]}' for name, p in pairs)
        elif data.task == 'maps':
            maps = out / 'maps'
            for name, picture in zip(names, pictures, strict=True):
                target = maps / f'{name}.png'
                if _converts(data, picture):
                    write_map(picture.target, target, data.lookup)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(picture.target, target)
            prefixes = dict(img_path='', seg_map_path=os.fspath(maps))
            arguments = dict(data_prefix=prefixes, img_suffix='', seg_map_suffix='.png')
        else:
            entries = ((p.image | dict(file_name=p.inner), p.objects) for p in pictures)
            path, text = path.with_suffix('.json'), coco_json(data.classes, entries)
            arguments = dict(data_prefix=dict(img=''))
        with replacing(path) as partial:
            partial.write_text(text + '\n', encoding='utf-8')
        yield part, arguments | dict(ann_file=os.fspath(path))
