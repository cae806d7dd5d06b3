"""Checks that all nodes run the same training (config, data, code, versions) before anything is
built.

Otherwise ranks would use different learning rates or code, or wait for a batch that the others do
not have.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import all_gather_object, get_rank, get_world_size, init_dist, is_distributed

from mmvttt.errors import UsageError

from .data.contents import file_digest
from .data.dataset_config import DatasetConfig, datasets_of
from .settings import flatten

_PACKAGES = (
    'mmvttt', 'torch', 'triton', 'numba', 'numpy', 'mmengine', 'mmdet', 'mmsegmentation',
    'mmpretrain', 'mmcv', 'mmcv-lite', 'timm',
)  # fmt: skip
# Packages whose sources are compared; those in `custom_imports` are added.
_SOURCES = ('mmvttt', 'ttt_kernels')


def require_same_training(cfg: Config) -> None:
    """Initialises a distributed training, and checks that all processes run the same one.

    Raises:
        UsageError: On all ranks: the first difference, and the node that has it.
    """
    if cfg.get('launcher', 'none') == 'none':
        return
    if not is_distributed():
        init_dist(cfg.launcher, **((cfg.get('env_cfg') or {}).get('dist_cfg') or {}))
    sets = [*datasets_of(cfg, 'train'), *datasets_of(cfg, 'val')]
    imported = (cfg.get('custom_imports') or {}).get('imports') or ()
    require_same(
        {
            **dict(flatten(cfg)),
            **dict(pair for data in sets for pair in _annotations(data)),
            **dict(_sources(imported)),
            **dict(_versions()),
            'the device': get_device(),
            'the backend of the kernels': os.environ.get('TTT_KERNELS_BACKEND', 'by device'),
        }
    )


def require_same(facts: Mapping[str, str]) -> None:
    """Compares facts, by name, with the facts of all other ranks.

    Raises:
        UsageError: See `require_same_training`.
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


def _annotations(data: DatasetConfig) -> Iterator[tuple[str, str]]:
    path = {key: path for key, _, path in data.paths()}.get('ann_file', '')
    if os.path.isfile(path):
        text = f'{os.path.getsize(path)} bytes ({file_digest(path)})'
        yield f'the content of {data.place}.ann_file', text


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
