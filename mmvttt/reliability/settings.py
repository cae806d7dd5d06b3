"""Settings of a config by their dotted keys, to be compared between ranks and with a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config

# Last parts of keys whose values a node may have to itself.
_PLACES = ('dir', 'root', 'file', 'prefix', 'path', 'img', 'img_path', 'seg_map_path', 'load_from')
# Parts of a config that decide what a step of a resumed training does.
_TRAINING = (
    'model', 'data_preprocessor', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'custom_hooks',
    'runner_type', 'strategy',
)  # fmt: skip
# Settings in them that do not: the state of the optimizer is the checkpoint's.
_RESTORED = 'optim_wrapper.optimizer.'
_FREE = (
    'num_workers', 'persistent_workers', 'pin_memory', 'prefetch_factor', 'val_interval',
    'val_begin', 'skip_bad_samples',
)  # fmt: skip


def flatten(value: Any, key: str = 'config') -> Iterator[tuple[str, str]]:
    """Every setting by its dotted key, but for places on the disk."""
    if isinstance(value, Mapping | Config):
        for name, inner in value.items():
            if not str(name).endswith(_PLACES) and name not in ('experiment_name', 'resume'):
                yield from flatten(inner, f'{key}.{name}')
    elif isinstance(value, list | tuple):
        yield key, f'{len(value)} entries'
        for index, inner in enumerate(value):
            yield from flatten(inner, f'{key}.{index}')
    elif isinstance(value, type):
        # As a pure-Python config is dumped.
        yield key, repr(f'{value.__module__}.{value.__qualname__}')
    elif not (isinstance(value, str) and os.path.isabs(value)):
        text = repr(value)
        # Objects are named by their address.
        yield key, type(value).__name__ if ' at 0x' in text else text


def training_settings(cfg: Config) -> dict[str, str]:
    """Settings that decide what a training step does, for the checkpoint."""
    parts = {name: cfg[name] for name in _TRAINING if cfg.get(name) is not None}
    found = (pair for name, part in parts.items() for pair in flatten(part, name))
    return {
        key: text
        for key, text in found
        if key.rpartition('.')[2] not in _FREE and not key.startswith(_RESTORED)
    }


def differences(before: Any, now: Mapping[str, str]) -> list[str]:
    """Settings of a checkpoint that are others now, as `key: before (now: …)`."""
    if not isinstance(before, Mapping):
        # A checkpoint of mmengine's own, or of an older version.
        return []
    keys = [*before, *(key for key in now if key not in before)]
    return [
        f'{key}: {before.get(key, "nothing")} (now: {now.get(key, "nothing")})'
        for key in keys
        if before.get(key) != now.get(key)
    ]
