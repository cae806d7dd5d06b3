"""Data set whose items are a function of a key, with errors that name the faulty file.

Random numbers are a function of the training's position, the key (seed, rank, purpose, step, …).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from mmengine import registry
from mmengine.logging import print_log

from mmvttt.errors import DataError

from ..data.dataset_config import innermost
from ..data.images import read_image
from ..registry import DATASETS

# Purposes of random numbers that share a seed, a rank and a step.
IMAGE, STEP, VALIDATION = range(3)

Key = tuple[int, ...]


def seed_everything(key: Key) -> None:
    """Seeds `random`, NumPy and torch (every device) from a few non-negative integers."""
    python, numpy, torch_ = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(python))
    np.random.seed(numpy)
    if _has_accelerator():
        torch.manual_seed(int(torch_))
    else:
        # torch.manual_seed also stores the seed with a stack trace for devices that are initialised
        # later, which takes milliseconds an image.
        torch.default_generator.manual_seed(int(torch_))


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


@DATASETS.register_module()
class SeededDataset:
    """Data set whose item `(i, key)` is a function of i and key.

    An index without a key returns the inner data set's item. All other attributes are read from and
    set on the inner data set. An image or label map that cannot be read is a DataError with its
    path.

    Args:
        dataset: Config of the data set.
    """

    def __init__(self, dataset: dict) -> None:
        built = registry.DATASETS.build(dataset)
        sized = not hasattr(built, 'get_data_info')
        vars(self).update(_dataset=built, _config=dataset, _sized=sized)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        # Pickle looks up special methods before `_dataset` exists.
        if name.startswith('__') or name == '_dataset':
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, index: int | tuple[int, Key]) -> Any:
        index, key = index if isinstance(index, tuple) else (index, None)
        # A second read from a file server may succeed.
        with suppress(Exception):
            return self._item(index, key)
        try:
            return self._item(index, key)
        except Exception as error:
            if problem := _bad_file(self._config, self._dataset, index):
                raise DataError(f'{problem}; tools/check_data.py names all such files') from error
            raise

    def _item(self, index: int, key: Key | None) -> Any:
        if key is not None:
            seed_everything(key)
        item = self._dataset[index]
        if not self._sized and isinstance(item, dict):
            vars(self)['_sized'] = self._look_at_size(index, item)
        return item

    def _look_at_size(self, index: int, item: dict) -> bool:
        """Warns of an image of another size than annotated, whose boxes are then misplaced.

        True after one warning, or if no size is annotated: then nothing is left to check.
        """
        info = self._dataset.get_data_info(index)
        noted = (info.get('height'), info.get('width')) if isinstance(info, dict) else (None, None)
        loaded = getattr(item.get('data_samples'), 'metainfo', {})
        shape = tuple(loaded.get('ori_shape', noted))
        # The pipeline may have loaded another image.
        if None not in noted and (shape == noted or loaded.get('img_path') != info.get('img_path')):
            return False
        if None not in noted:
            print_log(
                f'{info["img_path"]!r} has height and width {shape}, and is annotated as {noted}; '
                'tools/check_data.py names all such images',
                'current',
                logging.WARNING,
            )
        return True


def _bad_file(config: Mapping, dataset: Any, index: int) -> str | None:
    """The problem with an item's image or label map and its path, or None."""
    try:
        info = dataset.get_data_info(index)
    except Exception:
        # This may raise the same error.
        return None
    sets = list(innermost(config))
    if any(data.remote for data in sets):
        return None
    files = [('img_path', 'images')]
    if any(data.reads_label_maps for data in sets):
        files.append(('seg_map_path', 'label maps'))
    for key, kind in files:
        path = info.get(key) if isinstance(info, dict) else None
        problem = read_image(path).problem if isinstance(path, str) else None
        if problem:
            return f'{path!r} is among the {problem.replace("images", kind)}'
    return None
