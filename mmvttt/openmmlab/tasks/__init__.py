"""Tasks: what the commands know about detection, segmentation and classification."""

from collections.abc import Mapping
from typing import Any

from .classification import Classification
from .detection import Detection
from .segmentation import Segmentation
from .task import Start, Task, class_counts, picture_size, set_picture_size

__all__ = [
    'ROWS_OF_CLASS', 'TASKS', 'Start', 'Task', 'class_counts', 'class_layer', 'picture_size',
    'set_picture_size', 'task_for', 'task_of',
]  # fmt: skip
TASKS: tuple[Task, ...] = (Detection(), Segmentation(), Classification())
_OTHER = Task()
_LAYERS = {layer for task in TASKS for layer in task.layers}
# Layers with more than one row for each class: the coordinates of a box.
ROWS_OF_CLASS = {'fc_reg': 4}


def task_of(of: Any) -> Task:
    """The task of a config, by its `default_scope`, or of a model, by its class's package.

    For any other it is a plain `Task`, whose `toolbox` is ''.
    """
    if isinstance(of, Mapping) or hasattr(of, 'filename'):
        packages = [of.get('default_scope')]
    else:
        # A pure-Python config has no default_scope.
        packages = [kind.__module__.partition('.')[0] for kind in type(of).__mro__]
    return next((task for p in packages for task in TASKS if task.toolbox == p), _OTHER)


def task_for(kind: str) -> Task:
    """The task that learns 'boxes', 'masks', 'maps' or 'classes'."""
    return next(task for task in TASKS if kind in task.measures)


def class_layer(name: str) -> str | None:
    """The layer of a head's tensor whose rows belong to classes (`Task.layers`), or None."""
    if not {'backbone', 'neck'}.isdisjoint(name.split('.')):
        return None
    return next((layer for layer in _LAYERS if f'.{layer}.' in f'.{name}'), None)
