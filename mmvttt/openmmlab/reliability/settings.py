"""Settings of a config by dotted key, for comparison between ranks and with a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config

# Keys whose values are paths, which may differ between nodes.
_PLACES = frozenset(
    """
    ann_file cache_dir checkpoint_file data_prefix data_root dir_path download_root file_path
    hierarchy_file image_level_ann_file img_prefix img_save_dir label_file label_map_file list_file
    load_from log_dir meta_file out_dir out_file out_file_path outfile_path outfile_prefix
    output_dir proposal_file proposals_file result_dir root save_dir seg_prefix show_dir split_file
    sub_data_root test_out_dir work_dir
    """.split()  # noqa: SIM905
)
# Parts of a config that determine a step of a resumed training.
_TRAINING = (
    'model', 'data_preprocessor', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'custom_hooks',
    'runner_type', 'strategy', 'param_scheduler', 'auto_scale_lr',
)  # fmt: skip
# Settings that a resume takes from the checkpoint, because optimizer and schedules have a state.
_RESTORED = (
    'optim_wrapper.optimizer', 'optim_wrapper.paramwise_cfg', 'optim_wrapper.constructor',
    'param_scheduler', 'auto_scale_lr',
)  # fmt: skip
_FREE = (
    'num_workers', 'persistent_workers', 'pin_memory', 'prefetch_factor', 'val_interval',
    'val_begin', 'skip_bad_samples',
)  # fmt: skip


def flatten(value: Any, key: str = 'config') -> Iterator[tuple[str, str]]:
    """Every setting by its dotted key, except paths."""
    if isinstance(value, Mapping | Config):
        for name, inner in value.items():
            if name not in _PLACES and name not in ('experiment_name', 'resume'):
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
        # The repr of an object may contain its address.
        yield key, type(value).__name__ if ' at 0x' in text else text


def training_settings(cfg: Config) -> dict[str, str]:
    """Settings that determine a training step, for the checkpoint."""
    parts = {name: cfg[name] for name in _TRAINING if cfg.get(name) is not None}
    found = (pair for name, part in parts.items() for pair in flatten(part, name))
    return {key: text for key, text in found if key.rpartition('.')[2] not in _FREE}


def differences(before: Any, now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Settings that differ between a checkpoint and the config, with both values.

    Returns:
        Differences where a resume takes the checkpoint's value, and where it takes the config's.
    """
    restored: list[str] = []
    others: list[str] = []
    # A checkpoint of mmengine's own has none.
    for key in {**before, **now} if isinstance(before, Mapping) else ():
        there, here = before.get(key, 'nothing'), now.get(key, 'nothing')
        if there != here and key.startswith(_RESTORED):
            restored.append(f'{key}: {there} (config: {here})')
        elif there != here:
            others.append(f'{key}: {there} (now: {here})')
    return restored, others
