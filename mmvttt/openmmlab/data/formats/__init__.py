"""The formats in which people have annotated pictures: each says what it finds in a folder."""

from collections.abc import Callable

from ..reading import Reading
from ..tree import Tree
from . import classes, coco, maps, shapes, voc, yolo

# Annotations that name what they annotate; then maps, which may have no names; folders at last.
ANNOTATIONS: dict[str, Callable[[Tree], Reading]] = {
    'coco': coco.read, 'yolo': yolo.read, 'voc': voc.read, 'labelme': shapes.labelme,
    'cvat': shapes.cvat, 'label-studio': shapes.label_studio,
}  # fmt: skip
FORMATS = {**ANNOTATIONS, 'maps': maps.read, 'classes': classes.read}
