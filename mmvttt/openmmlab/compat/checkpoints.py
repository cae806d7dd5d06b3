"""Patches of mmengine for whole checkpoints, whose code is not run.

Its loaders get the reader of `mmvttt.checkpoints.read`: mmengine reads URLs with full pickle, and
all files where TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set. docs/patches.md has the reasons,
docs/safety.md is for users. Each function imports its target, because this module is imported with
mmengine.
"""

from __future__ import annotations

import logging
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import CheckpointError

from .patch import replace

if TYPE_CHECKING:
    from mmengine.fileio import LocalBackend
    from mmengine.infer import BaseInferencer
    from mmengine.logging import HistoryBuffer
    from torch import nn


def load_safely(file: Any, map_location: Any = None, **_: Any) -> Any:
    """`torch.load` by `read_content`, whatever the arguments or the environment."""
    from mmvttt.checkpoints.read import read_content

    return _with_history(read_content(file, map_location))


def _with_history(content: Any) -> Any:
    """A checkpoint of mmengine, with log curves as mmengine's own objects."""
    from mmengine.logging import HistoryBuffer

    from mmvttt.checkpoints.allow_list import LogCurve

    hub = content.get('message_hub') if isinstance(content, dict) else None
    curves = hub.get('log_scalars') if isinstance(hub, dict) else None
    log = curves if isinstance(curves, dict) else {}
    for name, curve in log.items():
        if isinstance(curve, LogCurve):
            log[name] = HistoryBuffer(curve.values, curve.counts, curve.max_length)
    return content


class _Torch(ModuleType):
    """torch for one module of mmengine, with another `load`."""

    load = staticmethod(load_safely)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def load_by_the_list() -> None:
    """Gives every loader of mmengine our reader."""
    from mmengine.runner import checkpoint

    def load_url(url: str, *_: Any, map_location: Any = None, **__: Any) -> Any:
        return load_safely(url, map_location)

    replace(checkpoint, 'torch', _Torch('torch'))
    replace(checkpoint, 'load_url', load_url)
    if hasattr(checkpoint, '_safe_torch_load'):
        # The fork's reader adds getattr to the list, and falls back to pickle.
        replace(checkpoint, '_safe_torch_load', load_safely)


def log_loading() -> None:
    """Sends mmengine's messages about a checkpoint to the log, which has the rest of the run."""
    from mmengine.logging import print_log
    from mmengine.runner import checkpoint

    def log(message: str, logger: Any = None, level: int = logging.INFO) -> None:
        print_log(message, logger or 'current', level)

    replace(checkpoint, 'print_log', log)


def drop_configs() -> None:
    """Wraps the one function that all of mmengine's loading goes through."""
    from mmengine.logging import print_log
    from mmengine.runner.checkpoint import CheckpointLoader

    original = CheckpointLoader.load_checkpoint.__func__

    @wraps(original)
    def load_checkpoint(cls: type, filename: str, *args: Any, **kwargs: Any) -> Any:
        content = original(cls, filename, *args, **kwargs)
        # `meta['cfg']`, which mmengine itself writes, stays: no resume runs it.
        meta = content.get('meta') if isinstance(content, dict) else None
        if isinstance(meta, dict) and meta.pop('config', None) is not None:
            print_log(f"{filename}: left out meta['config'], which mmengine would run", 'current')
        return content

    replace(CheckpointLoader, 'load_checkpoint', classmethod(load_checkpoint))


def ask_for_config() -> None:
    """Makes mmengine's inferencers refuse a config from a checkpoint."""
    from mmengine.infer.infer import BaseInferencer

    original = BaseInferencer._init_model

    @wraps(original)
    def init_model(
        self: BaseInferencer, cfg: Any, weights: Any, *args: Any, **kwargs: Any
    ) -> nn.Module:
        if not cfg:
            raise CheckpointError(
                f'the inferencer has no config, and the one inside {weights!r} is not run, since '
                "it is code of the file's author; give the config: model='path/of/config.py'"
            )
        return original(self, cfg, weights, *args, **kwargs)

    replace(BaseInferencer, '_init_model', init_model)


def save_numbers_only() -> None:
    """Removes the functions of a log curve from its state: they belong to the class."""
    from mmengine.logging.history_buffer import HistoryBuffer

    def state(self: HistoryBuffer) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != 'statistics_methods'}

    replace(HistoryBuffer, '__getstate__', state)


def write_whole_files() -> None:
    """Makes mmengine's local backend, which writes checkpoints, use `write_whole`."""
    from mmengine.fileio.backends.local_backend import LocalBackend

    def put_text(_: LocalBackend, obj: str, filepath: str, encoding: str = 'utf-8') -> None:
        write_whole(filepath, obj.encode(encoding))

    replace(LocalBackend, 'put', lambda _, obj, filepath: write_whole(filepath, obj))
    replace(LocalBackend, 'put_text', put_text)
