"""Patches of mmengine that keep checkpoints whole, and code in them from running.

Its loaders get the reader of `read.py`: mmengine reads URLs with full pickle, and all files where
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set. docs/patches.md has the reason of each, docs/safety.md is
for users.
"""

from __future__ import annotations

import logging
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from mmengine.fileio import LocalBackend
from mmengine.infer import BaseInferencer
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.visualization import LocalVisBackend
from torch import nn

from ..compat.patch import patch, replace
from ..errors import CheckpointError
from .atomic_write import write_whole
from .read import read_content


def load_safely(file: Any, map_location: Any = None, **_: Any) -> Any:
    """`torch.load` by `read_content`, whatever the caller or the environment asks for."""
    return read_content(file, map_location)


class _Torch(ModuleType):
    """torch as one module of mmengine sees it: with another `load`."""

    load = staticmethod(load_safely)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@patch('safe-load', 'mmengine unpickles what comes from a URL; torch refuses its HistoryBuffer')
def load_by_the_list() -> str | None:
    """Gives every loader of mmengine the one reader."""

    def load_url(url: str, *_: Any, map_location: Any = None, **__: Any) -> Any:
        return read_content(url, map_location)

    replace(mmengine_checkpoint, 'torch', _Torch('torch'))
    replace(mmengine_checkpoint, 'load_url', load_url)
    if hasattr(mmengine_checkpoint, '_safe_torch_load'):
        # The fork's: it puts getattr on the list, and falls back to pickle.
        replace(mmengine_checkpoint, '_safe_torch_load', load_safely)
    return None


@patch('safe-resume', 'mmengine runs the config in a checkpoint when a training resumes from it')
def drop_configs() -> str | None:
    """Wraps the one function that all of mmengine's loading goes through."""
    loader = mmengine_checkpoint.CheckpointLoader
    original = loader.load_checkpoint.__func__

    @wraps(original)
    def load_checkpoint(cls: type, filename: str, *args: Any, **kwargs: Any) -> Any:
        content = original(cls, filename, *args, **kwargs)
        # `meta['cfg']`, which mmengine itself writes, stays: no resume runs it.
        meta = content.get('meta') if isinstance(content, dict) else None
        if isinstance(meta, dict) and meta.pop('config', None) is not None:
            print_log(f"{filename}: left out meta['config'], which mmengine would run", 'current')
        return content

    replace(loader, 'load_checkpoint', classmethod(load_checkpoint))
    return None


@patch('safe-inferencer', 'an inferencer without a config runs the one in the checkpoint')
def ask_for_config() -> str | None:
    """Makes mmengine's inferencers refuse to take a config out of a checkpoint."""
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
    return None


@patch('plain-curves', 'with a HistoryBuffer.register_statistics no checkpoint can be read again')
def save_numbers_only() -> str | None:
    """Leaves the functions of a log curve out of its state: they are the class's, not its own."""

    def state(self: HistoryBuffer) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != 'statistics_methods'}

    replace(HistoryBuffer, '__getstate__', state)
    return None


@patch('whole-files', 'a kill while mmengine writes a checkpoint leaves half a file by its name')
def write_whole_files() -> str | None:
    """Makes mmengine's local backend, through which checkpoints go, write by `write_whole`."""

    def put_text(_: LocalBackend, obj: str, filepath: str, encoding: str = 'utf-8') -> None:
        write_whole(filepath, obj.encode(encoding))

    replace(LocalBackend, 'put', lambda _, obj, filepath: write_whole(filepath, obj))
    replace(LocalBackend, 'put_text', put_text)
    return None


@patch('full-disk', 'a full disk ends a training, by a line of the curves that cannot be written')
def log_without_room() -> str | None:
    """Makes mmengine's local curves say what cannot be written, and go on."""
    original = LocalVisBackend._dump

    @wraps(original)
    def dump(self: LocalVisBackend, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except OSError as error:
            print_log(f'the curves cannot be written: {error}', 'current', logging.WARNING)

    replace(LocalVisBackend, '_dump', dump)
    return None
