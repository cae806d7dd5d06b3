"""Checkpoints are read by an allow-list, whoever reads them, and nothing that they bring is run.

mmengine's checkpoints hold log curves (`HistoryBuffer`) and NumPy's arrays and numbers, which torch
refuses by itself; `checkpoints/allow_list.py` has what may be read instead. mmengine reads URLs
with full pickle, and all files where TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set; it runs the config
inside a checkpoint when a training resumes, and when an inferencer is not given one.
docs/safety.md tells users.
"""

from __future__ import annotations

import os
import pickle
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from mmengine.infer import BaseInferencer
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner import checkpoint as mmengine_checkpoint
from torch import nn

from ..checkpoints.allow_list import allowed
from ..checkpoints.read import damaged_part, stumbling_block
from ..errors import CheckpointError
from .patch import on_undo, patch, replace


class RefusedCheckpointError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint holds what is not on the allow-list."""


def load_safely(file: Any, map_location: Any = None, **_: Any) -> Any:
    """`torch.load` by the allow-list, whatever the caller or the environment asks for.

    Raises:
        CheckpointError: A part of the file has another checksum than was written.
    """
    if isinstance(file, str | os.PathLike) and (part := damaged_part(file)) is not None:
        raise CheckpointError(f'{file!r} is damaged: the checksum of its part {part!r} is wrong')
    return torch.load(file, map_location=map_location, weights_only=True)


class _Torch(ModuleType):
    """torch as one module of mmengine sees it: with another `load`."""

    load = staticmethod(load_safely)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _disallow(names: list) -> None:
    others = [g for g in torch.serialization.get_safe_globals() if g not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(others)


@patch('resume', "torch >= 2.6 refuses mmengine's HistoryBuffer and NumPy objects when resuming")
def allow_checkpoints() -> str | None:
    """Puts the stand-ins on torch's allow-list."""
    ours = allowed()
    torch.serialization.add_safe_globals(ours)
    on_undo(_disallow, ours)
    return None


@patch('safe-load', 'mmengine unpickles what comes from a URL, and the onedl fork whatever it must')
def load_by_the_list() -> str | None:
    """Makes every loader of mmengine read by the allow-list."""
    replace(mmengine_checkpoint, 'torch', _Torch('torch'))
    load_url = partial(mmengine_checkpoint.load_url, weights_only=True)
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
        try:
            content = original(cls, filename, *args, **kwargs)
        except pickle.UnpicklingError as error:
            raise RefusedCheckpointError(
                f'the checkpoint {filename!r} is not read: it holds {stumbling_block(error)}, and '
                'reading that could run code. Where you trust its source, docs/safety.md says how '
                'to make a plain checkpoint of it'
            ) from None
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
