"""Lists of the names of classes beside labels and label maps."""

from __future__ import annotations

import os
import re

from ..reading import Reading
from ..text_files import read_text
from ..tree import Tree

# CVAT (YOLO 1.1), Roboflow (Darknet, label maps), labelImg and Label Studio, labelme.
NAMES = (
    *('obj.names', '_darknet.labels', '_classes.csv', 'classes.txt', 'labels.txt', 'names.txt'),
    *('class_names.txt', 'labelmap.txt', 'class_dict.csv'),
)
# '0: cat' and '0,cat', or '0 cat'.
_NUMBERED = re.compile(r'(\d+)\s*([:,;\t])\s*(\S.*)|(\d+)\s+(\S.*)')


def read_names(tree: Tree, reading: Reading) -> list[str]:
    """The names in the folder's list by their numbers, '' for none; lists must not differ."""
    lists: dict[str, list[str]] = {}
    for source in tree.files:
        if source.rpartition('/')[2].lower() in NAMES or source.endswith('.names'):
            reading.used.add(source)
            lists[source] = tree.content(source, _read_list) or []
    if len({*map(tuple, lists.values())}) > 1:
        reading.lacks.append(f'{" and ".join(map(repr, [*lists][:3]))} differ: move one')
    return next(iter(lists.values()), [])


def _read_list(path: str | os.PathLike[str]) -> list[str]:
    """The names in a file; its lines may begin with their numbers, in a table below a head."""
    lines = [line.strip() for line in read_text(path).rstrip().split('\n')]
    # labelme's class -1.
    lines = lines[1:] if lines[0] == '__ignore__' else lines
    first = lines[0] if lines else ''
    head = ',' in first and not first[0].isdigit()
    return _numbered(lines[head:]) or (lines if any(lines) else [])


def _numbered(lines: list[str]) -> list[str]:
    """The names behind consecutive numbers, '' for one that is missing; empty if not all have one.

    '1 euro' is a name: only numbers from 0, or with a colon or a comma, are those of classes.
    """
    rows = [match for match in map(_NUMBERED.match, lines) if match]
    names = [row[3] or row[5] for row in rows]
    first = int(rows[0][1] or rows[0][4]) if rows else 0
    numbers = [str(first + k) for k in range(len(lines))]
    if [row[1] or row[4] for row in rows] != numbers or len({*names}) < len(names):
        return []
    marked = all(row[2] for row in rows)
    return [''] * first + names if first == 0 or (first == 1 and marked) else []
