"""Checks before a run that a config's data exists and makes sense."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence

from mmengine.config import Config
from mmengine.logging import print_log

from mmvttt.errors import DataError, MissingDataError

from .annotations import check_annotations
from .dataset_config import DatasetConfig, datasets_of

_KINDS = {'train': 'training', 'val': 'validation', 'test': 'test'}
# How a config names an environment variable, with a default: {{$NAME:default}}.
_VARIABLE = re.compile(r'\{\{\s*[\'"]?\s*\$(\w+)\s*:\s*(\S*?)\s*[\'"]?\s*\}\}')


def check_data(cfg: Config, splits: Sequence[str] = ('train', 'val', 'test')) -> None:
    """Checks that the folders and annotation files that a config names exist, and make sense.

    Reads annotations for about a second (see `check_annotations`); tools/check_data.py reads all,
    and the images. Data that a training would drop silently is logged.

    Args:
        cfg: The config of a run.
        splits: Splits to check, of 'train', 'val', 'test'.

    Raises:
        ValueError: A split is none of these.
        MissingDataError: See `check_paths`.
        DataError: No class is a category, a file is not JSON, there is nothing to learn, a label is
            outside the classes, …, with a remedy.
    """
    check_paths(cfg, splits)
    for text in other_annotations(cfg, splits):
        _warn(text)
    for findings in check_annotations(cfg, splits, thorough=False):
        if findings.errors:
            raise DataError(f'{findings.place}: {findings.errors[0]}')
        for warning in findings.warnings:
            _warn(f'{findings.place}: {warning}')


def _warn(text: str) -> None:
    # All ranks read the same data; one of them logs.
    if os.environ.get('RANK', '0') == '0':
        print_log(text, 'current', logging.WARNING)


def check_paths(cfg: Config, splits: Sequence[str] = ('train', 'val', 'test')) -> None:
    """Checks that the folders and annotation files that a config names exist.

    Reads the config alone; sees through RepeatDataset, ConcatDataset and the like. Skips remote
    paths (`s3://…`), storage backends (`backend_args`) and downloaded data.

    Args:
        cfg: The config of a run.
        splits: See `check_data`.

    Raises:
        ValueError: A split is another one.
        MissingDataError: Names what is missing, where it was expected, and how to change the path.
    """
    unknown = [split for split in splits if split not in _KINDS]
    if unknown:
        raise ValueError(f'splits={list(splits)}: choose from {", ".join(_KINDS)}')
    for split in splits:
        for data in [*datasets_of(cfg, split), *datasets_of(cfg, split, 'evaluator')]:
            for key, what, path in data.paths():
                if not os.path.exists(os.path.expanduser(path)):
                    key = f'{data.place}.{key}'
                    raise MissingDataError(_missing(cfg.text, split, key, what, path))


def other_annotations(cfg: Config, splits: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each evaluator with another annotation file than mmdet's data set.

    With several data sets, an evaluator may read all their annotations from one file.

    Args:
        cfg: A config whose files exist (see `check_paths`).
        splits: See `check_data`.
    """
    for split in splits:
        sets = datasets_of(cfg, split)
        if len(sets) != 1 or sets[0].toolbox != 'mmdet':
            continue
        own = _annotations(sets[0])
        for metric in datasets_of(cfg, split, 'evaluator'):
            path = _annotations(metric)
            if own and path and os.path.realpath(path) != os.path.realpath(own):
                yield (
                    f'{metric.place}.ann_file is {path!r}, and {sets[0].place} reads {own!r}: '
                    'predictions are compared with the annotations of other images; set '
                    f'{metric.place}.ann_file={own}'
                )


def _annotations(data: DatasetConfig) -> str | None:
    paths = {key: path for key, _, path in data.paths()}
    return os.path.expanduser(paths['ann_file']) if 'ann_file' in paths else None


def _missing(text: str, split: str, key: str, what: str, path: str) -> str:
    by_variable = ''
    for name, default in dict(_VARIABLE.findall(text)).items():
        value = os.environ.get(name, default)
        if value and path.startswith(value):
            by_variable += f', set the environment variable {name} (now {value!r})'
    return (
        f'The {_KINDS[split]} data is missing: the {what} {path!r} does not exist (expected at '
        f'{os.path.abspath(os.path.expanduser(path))}, named by {key}); put or link it there'
        f'{by_variable}, or point elsewhere with --cfg-options {key}=PATH'
    )
