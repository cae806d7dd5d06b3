"""Lines that other packages print and nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from io import StringIO
from typing import Any

from .patch import replace


def silence_coco() -> None:
    """Keeps pycocotools from printing: CocoMetric returns its results, for one line of the log."""
    from pycocotools import coco
    from pycocotools.cocoeval import COCOeval

    replace(coco, 'print', lambda *_, **__: None)
    for name in ('evaluate', 'accumulate', 'summarize'):
        replace(COCOeval, name, _silent(getattr(COCOeval, name)))


def _silent(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with redirect_stdout(StringIO()):
            return function(*args, **kwargs)

    return run


def silence_file_client() -> None:
    """Keeps mmengine from warning of its own use of its old FileClient."""
    from mmengine.fileio import file_client

    replace(file_client, 'print_log', lambda *_, **__: None)
