"""Says before a run, in one sentence, which data is missing and how to point elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.config import Config

# What data sets wrap others in, in mmengine and the toolboxes.
_WRAPPED = ('dataset', 'datasets')
_KINDS = {'train': 'training', 'val': 'validation', 'test': 'test'}
# How a config names an environment variable, with a default: {{$NAME:default}}.
_VARIABLE = re.compile(r'\{\{\s*[\'"]?\s*\$(\w+)\s*:\s*(\S*?)\s*[\'"]?\s*\}\}')


class MissingDataError(FileNotFoundError):
    """The data of a config is not where the config says."""


def check_data(cfg: Config, splits: Sequence[str] = ('train', 'val', 'test')) -> None:
    """Checks that the folders and annotation files that a config names exist.

    Reads the config alone, before anything is built; sees through RepeatDataset, ConcatDataset and
    the like. Remote paths (`s3://…`) are not looked at.

    Args:
        cfg: The config of a run.
        splits: Which of the config's data to check: of 'train', 'val', 'test'.

    Raises:
        MissingDataError: Something is missing: what, where it was expected, how to point elsewhere.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') or {}
        places = [
            *_datasets(loader.get('dataset'), f'{split}_dataloader.dataset'),
            *_datasets(cfg.get(f'{split}_evaluator'), f'{split}_evaluator'),
        ]
        for place, config in places:
            for key, what, path in _paths(config):
                if '://' not in path and not os.path.exists(os.path.expanduser(path)):
                    raise MissingDataError(_sentence(cfg, split, f'{place}.{key}', what, path))


def _datasets(config: Any, place: str) -> Iterator[tuple[str, Mapping]]:
    """The innermost data sets (or metrics) of a config, with the dotted key of each."""
    if isinstance(config, (list, tuple)):
        for index, inner in enumerate(config):
            yield from _datasets(inner, f'{place}.{index}')
    elif isinstance(config, Mapping):
        wrapped = [key for key in _WRAPPED if key in config]
        for key in wrapped:
            yield from _datasets(config[key], f'{place}.{key}')
        if not wrapped:
            yield place, config


def _paths(config: Mapping) -> Iterator[tuple[str, str, str]]:
    """Key, meaning and path of everything that a data set or metric reads, the root first."""
    root = config.get('data_root') or ''
    if root:
        yield 'data_root', 'folder', root
    annotations = config.get('ann_file') or ''
    if isinstance(annotations, str) and annotations:
        yield 'ann_file', 'annotation file', os.path.join(root, annotations)
    prefixes = config.get('data_prefix') or {}
    if isinstance(prefixes, str):
        prefixes = {'': prefixes}
    for name, prefix in prefixes.items():
        if prefix:
            key = f'data_prefix.{name}' if name else 'data_prefix'
            yield key, 'folder', os.path.join(root, prefix)


def _sentence(cfg: Config, split: str, key: str, what: str, path: str) -> str:
    variables = {
        name: os.environ.get(name, default) for name, default in _VARIABLE.findall(cfg.text)
    }
    by_variable = ''.join(
        f', set the environment variable {name} (now {value!r})'
        for name, value in variables.items()
        if value and path.startswith(value)
    )
    return (
        f'The {_KINDS[split]} data is missing: the {what} {path!r} does not exist (expected at '
        f'{os.path.abspath(os.path.expanduser(path))}, named by {key}); put or link it there'
        f'{by_variable}, or point elsewhere with --cfg-options {key}=PATH'
    )
