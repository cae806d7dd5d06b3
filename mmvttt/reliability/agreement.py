"""Whether all nodes run the same training: config, annotations, versions, before anything is built.

Nothing else would say so: each rank steps with its own learning rate, or waits for a batch that the
others do not have.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mmengine.config import Config
from mmengine.dist import all_gather_object, get_rank, get_world_size, init_dist, is_distributed

from ..errors import UsageError
from .data.annotations import innermost
from .heartbeat import start_heartbeat

# The last parts of keys whose values a node may have to itself.
_PLACES = ('dir', 'root', 'file', 'prefix', 'path', 'img', 'img_path', 'seg_map_path', 'load_from')
_PACKAGES = ('mmvttt', 'torch', 'triton', 'numpy', 'mmengine', 'mmdet', 'mmsegmentation')
_PACKAGES += ('mmpretrain', 'mmcv', 'mmcv-lite', 'timm')
_LARGE = 64 * 2**20


def agree_on_start(cfg: Config) -> None:
    """Joins the processes of a distributed training, and compares what each is about to do.

    From here on a rank that hangs is named, see `heartbeat`.

    Raises:
        UsageError: On all ranks alike: the first difference, and the node that has it.
    """
    if cfg.get('launcher', 'none') == 'none':
        return
    if not is_distributed():
        init_dist(cfg.launcher, **((cfg.get('env_cfg') or {}).get('dist_cfg') or {}))
    start_heartbeat()
    require_same({**dict(_settings(cfg)), **dict(_annotations(cfg)), **_versions()})


def require_same(facts: Mapping[str, str]) -> None:
    """Compares facts, by name, with those of all other ranks.

    Raises:
        UsageError: See `agree_on_start`.
    """
    if get_world_size() == 1:
        return
    place = f'node {socket.gethostname()!r} (rank {get_rank()})'
    (first, there), *others = all_gather_object((place, dict(facts)))
    for other, here in others:
        for name in [*there, *here]:
            a, b = there.get(name, 'nothing'), here.get(name, 'nothing')
            if a != b:
                raise UsageError(
                    f'the nodes do not run the same training: {name} is {a} on {first}, and {b} on '
                    f'{other}; start all nodes with the same config, arguments, data and versions'
                )


def _settings(value: Any, key: str = 'config') -> Iterator[tuple[str, str]]:
    """Every setting by its dotted key, but for places on the disk."""
    if isinstance(value, Mapping | Config):
        for name, inner in value.items():
            if not str(name).endswith(_PLACES) and name not in ('experiment_name', 'resume'):
                yield from _settings(inner, f'{key}.{name}')
    elif isinstance(value, list | tuple):
        yield key, f'{len(value)} entries'
        for index, inner in enumerate(value):
            yield from _settings(inner, f'{key}.{index}')
    elif not (isinstance(value, str) and os.path.isabs(value)):
        text = repr(value)
        # Objects are named by their address.
        yield key, type(value).__name__ if ' at 0x' in text else text


def _annotations(cfg: Config) -> Iterator[tuple[str, str]]:
    """A digest of each annotation file."""
    for split in ('train', 'val'):
        dataset = (cfg.get(f'{split}_dataloader') or {}).get('dataset')
        for place, config in innermost(dataset, f'{split}_dataloader.dataset'):
            file = config.get('ann_file')
            path = os.path.join(config.get('data_root') or '', file if file else '')
            if file and os.path.isfile(path):
                yield f'the content of {place}.ann_file', _digest(path)


def _digest(path: str) -> str:
    """Of the whole file, or of size, beginning and end of a large one."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, 'rb') as file:
        if size <= _LARGE:
            digest.update(file.read())
        else:
            digest.update(file.read(_LARGE // 2))
            file.seek(-_LARGE // 2, os.SEEK_END)
            digest.update(file.read())
    return f'{size} bytes ({digest.hexdigest()[:12]})'


def _versions() -> dict[str, str]:
    found = {'the version of Python': platform.python_version().rpartition('.')[0]}
    for package in _PACKAGES:
        try:
            found[f'the version of {package}'] = version(package)
        except PackageNotFoundError:
            continue
    return found
