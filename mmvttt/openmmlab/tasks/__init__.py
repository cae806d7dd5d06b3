"""Tasks: what the commands know about detection, segmentation and classification."""

from collections.abc import Mapping
from typing import Any

from .classification import Classification
from .detection import Detection
from .segmentation import Segmentation
from .task import Start, Task, class_counts, picture_size, set_picture_size

__all__ = [
    'TASKS', 'Start', 'Task', 'class_counts', 'picture_size', 'set_picture_size', 'task_for',
    'task_of',
]  # fmt: skip
TASKS: tuple[Task, ...] = (Detection(), Segmentation(), Classification())
_OTHER = Task()


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
