"""Lists of the names of classes beside labels and label maps."""

from __future__ import annotations

from ..reading import Reading
from ..text_files import read_lines
from ..tree import Tree

# CVAT (YOLO 1.1), Roboflow (Darknet, label maps), labelImg and Label Studio, labelme.
NAMES = (
    *('obj.names', '_darknet.labels', '_classes.csv', 'classes.txt', 'labels.txt', 'names.txt'),
    *('class_names.txt', 'labelmap.txt', 'class_dict.csv'),
)


def read_names(tree: Tree, reading: Reading) -> list[str]:
    """The names in the folder's list, in the order of their numbers; lists must not differ."""
    lists: dict[str, list[str]] = {}
    for source in tree.files:
        if source.rpartition('/')[2].lower() not in NAMES and not source.endswith('.names'):
            continue
        lines = tree.content(source, read_lines) or []
        if lines and lines[0].startswith('Pixel Value'):
            # Roboflow's table.
            lines = [line.partition(',')[2].strip() for line in lines[1:]]
        reading.used.add(source)
        # labelme's class -1.
        lists[source] = lines[1:] if lines[:1] == ['__ignore__'] else lines
    if len({*map(tuple, lists.values())}) > 1:
        reading.lacks.append(f'{" and ".join(map(repr, [*lists][:3]))} differ: move one')
    return next(iter(lists.values()), [])
