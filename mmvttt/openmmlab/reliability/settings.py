"""Settings of a training by dotted key, compared between nodes and with a checkpoint.

Otherwise ranks would use different learning rates or code, or wait for a batch that the others do
not have; and a resume would continue another training.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import all_gather_object, get_rank, get_world_size, init_dist, is_distributed
from mmengine.logging import print_log

from mmvttt.errors import UsageError
from mmvttt.text import listed, shown

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
    'val_begin',
)  # fmt: skip

# Options of a model that count in a training only, or whose shapes or images are compared.
_OF_TRAINING = frozenset(
    """
    data_preprocessor drop_path_rate drop_rate evaluate_teacher frozen_stages init_cfg mesa_weight
    norm_eval num_classes pretrained test_cfg train_cfg with_cp
    """.split()  # noqa: SIM905
)

_PACKAGES = (
    'mmvttt', 'torch', 'triton', 'numba', 'numpy', 'mmengine', 'mmdet', 'mmsegmentation',
    'mmpretrain', 'mmcv', 'mmcv-lite', 'timm',
)  # fmt: skip
# Packages whose sources are compared; those in `custom_imports` are added.
_SOURCES = ('mmvttt', 'ttt_kernels')


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
    pairs = (pair for name, part in parts.items() for pair in flatten(part, name))
    return {key: text for key, text in pairs if key.rpartition('.')[2] not in _FREE}


def differences(before: Any, now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Settings that a resume takes from the checkpoint, and from the config, where they differ."""
    # A checkpoint of mmengine's own has none.
    before = {str(k): v for k, v in (before if isinstance(before, Mapping) else now).items()}
    changed = {
        key: (there, here)
        for key in {**before, **now}
        if (there := before.get(key, 'nothing')) != (here := now.get(key, 'nothing'))
    }
    return (
        [f'{k}: {a} (config: {b})' for k, (a, b) in changed.items() if k.startswith(_RESTORED)],
        [f'{k}: {a} (now: {b})' for k, (a, b) in changed.items() if not k.startswith(_RESTORED)],
    )


def warn_of_other_model(content: Any, cfg: Config, source: str) -> None:
    """Warns where a checkpoint was trained with other options of the model than a config has.

    Options without an effect on the shapes of weights, such as an inner rate, change results.
    """
    match content:
        case {'meta': {'settings': Mapping() as settings}}:
            there, here = (_of_model(s) for s in (settings, training_settings(cfg)))
            pairs = ((key, there.get(key), here.get(key)) for key in {**there, **here})
            # A published file has none.
            changed = [f'{key}: {a} (here: {b})' for key, a, b in pairs if there and a != b]
            if changed:
                print_log(
                    f'{source} was trained with other options of the model, whose results these '
                    f'are not: {listed(changed, longest=300)}',
                    'current',
                    logging.WARNING,
                )


def _of_model(settings: Mapping) -> dict[str, str]:
    """The options of a model, also inside of one for test-time augmentation."""
    named = {str(k).replace('model.module.', 'model.', 1): str(v) for k, v in settings.items()}
    return {
        key: shown(text, 60)
        for key, text in named.items()
        if key.startswith('model.')
        and not any(part in _OF_TRAINING or part[:4] == 'loss' for part in key.split('.'))
        and not key.startswith(('model.type', 'model.tta_cfg'))
    }


def require_same_training(cfg: Config) -> None:
    """Initialises a distributed training, and checks that all processes run the same one.

    Else a UsageError on all ranks names the first difference, and the node that has it.
    """
    if cfg.get('launcher', 'none') == 'none':
        return
    if not is_distributed():
        init_dist(cfg.launcher, **((cfg.get('env_cfg') or {}).get('dist_cfg') or {}))
    imported = (cfg.get('custom_imports') or {}).get('imports') or ()
    require_same(
        {
            **dict(flatten(cfg)),
            **dict(_sources(imported)),
            **dict(_versions()),
            'the device': get_device(),
            'the backend of the kernels': os.environ.get('TTT_KERNELS_BACKEND', 'by device'),
        }
    )


def require_same(facts: Mapping[str, str]) -> None:
    """Compares facts, by name, with those of all other ranks (see `require_same_training`)."""
    if get_world_size() == 1:
        return
    node = f'node {socket.gethostname()!r} (rank {get_rank()})'
    (first, there), *others = all_gather_object((node, dict(facts)))
    for other, here in others:
        for name in [*there, *here]:
            a, b = there.get(name, 'nothing'), here.get(name, 'nothing')
            if a != b:
                raise UsageError(
                    f'the nodes do not run the same training: {name} is {a} on {first}, and {b} on '
                    f'{other}; start all nodes with the same config, arguments, files and versions'
                )


def _sources(imported: str | Sequence[str]) -> Iterator[tuple[str, str]]:
    """Digest of the sources of mmvttt, its kernels, and the modules that a config imports."""
    for name in (*_SOURCES, *([imported] if isinstance(imported, str) else imported)):
        # A missing parent package is an error, which importing the module will report.
        with suppress(ModuleNotFoundError):
            spec = find_spec(name)
            file = Path((spec and spec.origin) or '')
            if spec is None or not file.is_file():
                continue
            # A wheel has copies of configs and tools in .mim.
            files = sorted(p for p in file.parent.rglob('*.py') if '.mim' not in p.parts)
            digest = hashlib.sha256()
            for path in files if spec.submodule_search_locations else [file]:
                digest.update(path.relative_to(file.parent).as_posix().encode())
                digest.update(path.read_bytes())
            yield f'the source of {name}', digest.hexdigest()[:12]


def _versions() -> Iterator[tuple[str, str]]:
    yield 'the version of Python', platform.python_version().rpartition('.')[0]
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield f'the version of {package}', version(package)
