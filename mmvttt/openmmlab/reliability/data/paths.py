"""Checks before a run that the data of a config is there, and can be meant."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from mmengine.config import Config
from mmengine.logging import print_log

from mmvttt.errors import DataError, MissingDataError

from .annotations import check_annotations
from .dataset_config import innermost, is_remote, reads_label_maps

_KINDS = {'train': 'training', 'val': 'validation', 'test': 'test'}
# How a config names an environment variable, with a default: {{$NAME:default}}.
_VARIABLE = re.compile(r'\{\{\s*[\'"]?\s*\$(\w+)\s*:\s*(\S*?)\s*[\'"]?\s*\}\}')


def check_data(cfg: Config, splits: Sequence[str] = ('train', 'val', 'test')) -> None:
    """Checks that the folders and annotation files that a config names exist, and make sense.

    Reads as much of the annotations as takes about a second (see `check_annotations`);
    tools/check_data.py reads all, and the images. What a training silently does without is logged.

    Args:
        cfg: The config of a run.
        splits: Which of the config's data to check: of 'train', 'val', 'test'.

    Raises:
        ValueError: A split is another one.
        MissingDataError: See `check_paths`.
        DataError: No class is a category, a file is no JSON, there is nothing to learn, a label is
            no class, …: what, and what to do.
    """
    check_paths(cfg, splits)
    for findings in check_annotations(cfg, splits, thorough=False):
        if findings.errors:
            raise DataError(f'{findings.place}: {findings.errors[0]}')
        # All ranks read the same; one of them logs it.
        if os.environ.get('RANK', '0') == '0':
            for warning in findings.warnings:
                print_log(f'{findings.place}: {warning}', 'current', logging.WARNING)


def check_paths(cfg: Config, splits: Sequence[str] = ('train', 'val', 'test')) -> None:
    """Checks that the folders and annotation files that a config names exist.

    Reads the config alone; sees through RepeatDataset, ConcatDataset and the like. Remote paths
    (`s3://…`), those of a storage backend (`backend_args`) and of data that is downloaded are not
    looked at.

    Args:
        cfg: The config of a run.
        splits: As of `check_data`.

    Raises:
        ValueError: A split is another one.
        MissingDataError: Something is missing: what, where it was expected, how to point elsewhere.
    """
    unknown = [split for split in splits if split not in _KINDS]
    if unknown:
        raise ValueError(f'splits={list(splits)}: choose from {", ".join(_KINDS)}')
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') or {}
        places = [
            *innermost(loader.get('dataset'), f'{split}_dataloader.dataset'),
            *innermost(cfg.get(f'{split}_evaluator'), f'{split}_evaluator'),
        ]
        for place, config in places:
            for key, what, path in () if is_remote(config) else _paths(config):
                if not os.path.exists(os.path.expanduser(path)):
                    raise MissingDataError(_missing(cfg, split, f'{place}.{key}', what, path))


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
        if prefix and (name != 'seg' or reads_label_maps(config)):
            key = f'data_prefix.{name}' if name else 'data_prefix'
            yield key, 'folder', os.path.join(root, prefix)


def _missing(cfg: Config, split: str, key: str, what: str, path: str) -> str:
    by_variable = ''
    for name, default in dict(_VARIABLE.findall(cfg.text)).items():
        value = os.environ.get(name, default)
        if value and path.startswith(value):
            by_variable += f', set the environment variable {name} (now {value!r})'
    return (
        f'The {_KINDS[split]} data is missing: the {what} {path!r} does not exist (expected at '
        f'{os.path.abspath(os.path.expanduser(path))}, named by {key}); put or link it there'
        f'{by_variable}, or point elsewhere with --cfg-options {key}=PATH'
    )
