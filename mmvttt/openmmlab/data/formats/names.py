"""Lists of the names of classes beside labels and label maps."""

from __future__ import annotations

import re

from ..reading import Reading
from ..text_files import read_text
from ..tree import Tree

# CVAT (YOLO 1.1), Roboflow (Darknet, label maps), labelImg and Label Studio, labelme.
NAMES = (
    *('obj.names', '_darknet.labels', '_classes.csv', 'classes.txt', 'labels.txt', 'names.txt'),
    *('class_names.txt', 'labelmap.txt', 'class_dict.csv'),
)
_NUMBERED = re.compile(r'(\d+)[\s:,]+(\D.*)')


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


def _read_list(path: str) -> list[str]:
    """The names in a file; its lines may begin with their numbers, below a head."""
    lines = [line.strip() for line in read_text(path).rstrip().split('\n')]
    # labelme's class -1.
    lines = lines[1:] if lines[0] == '__ignore__' else lines
    for rows in (lines, lines[1:]):
        pairs = [row.groups() for row in map(_NUMBERED.match, rows) if row]
        first = int(pairs[0][0]) if pairs else 2
        names = [name for _, name in pairs]
        numbers = [str(first + k) for k in range(len(rows))]
        # Not the coins of 1 and 2 euro.
        if first < 2 and [n for n, _ in pairs] == numbers and len({*names}) == len(names):
            return [''] * first + names
    return lines if any(lines) else []
