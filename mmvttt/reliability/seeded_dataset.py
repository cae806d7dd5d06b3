"""Data sets whose items are a function of a key, and whose failures name the file at fault."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from mmengine import registry
from mmengine.logging import print_log

from ..errors import DataError
from ..registry import DATASETS
from .data.annotations import explain_failure
from .data.dataset_config import innermost, is_remote, reads_label_maps
from .data.images import read_image
from .seeding import Key, seed_everything


class _Wrapper:
    """Everything of an inner data set but its items: attributes are read from it and set on it."""

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, '_dataset', dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        # Pickle asks for special methods before `_dataset` is there.
        if name.startswith('__') or name == '_dataset':
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@DATASETS.register_module()
class SeededDataset(_Wrapper):
    """Data set whose item number i, asked for as `(i, key)`, is a function of i and key.

    An item asked for by its number alone is the one that the inner data set gives.

    Args:
        dataset: Config of the data set.
        skip_bad_samples: Number of items whose image or label map cannot be read that are replaced
            by the next good one, with a warning each; shared by the data workers of a process.

    Raises:
        DataError: The data set cannot be built, or an item cannot be loaded, because of an
            annotation, an image or a label map: names it.
    """

    def __init__(self, dataset: dict, skip_bad_samples: int = 0) -> None:
        try:
            built = registry.DATASETS.build(dataset)
        except Exception as error:
            # A toolbox may raise anything when it meets what it does not expect.
            explained = explain_failure(dataset, error)
            if explained is None:
                raise
            raise explained from error
        super().__init__(built)
        object.__setattr__(self, '_config', dataset)
        object.__setattr__(self, '_bad', _BadItems(len(built), skip_bad_samples))

    def __getitem__(self, index: int | tuple[int, Key]) -> Any:
        index, key = index if isinstance(index, tuple) else (index, None)
        for _ in range(len(self)):
            # A file server may answer the second time.
            with suppress(Exception):
                return self._item(index, key)
            try:
                return self._item(index, key)
            except Exception as error:
                problem = _bad_file(self._config, self._dataset, index)
                if problem is None:
                    explained = explain_failure(self._config, error)
                    if explained is None:
                        raise
                    raise explained from error
                self._bad.leave_out(index, problem, error)
            index = (index + 1) % len(self)
        raise DataError('no image of the training data can be read')

    def _item(self, index: int, key: Key | None) -> Any:
        if key is not None:
            seed_everything(key)
        return self._dataset[index]


class _BadItems:
    """Items that cannot be read, of which a number may be left out.

    Args:
        items: Items of the data set.
        allowed: Number that may be left out.
    """

    def __init__(self, items: int, allowed: int) -> None:
        self.allowed = allowed
        # Shared with the data workers, which are forks.
        self.found = torch.zeros(items if allowed else 0, dtype=torch.bool)
        if allowed:
            self.found.share_memory_()

    def leave_out(self, index: int, problem: str, error: Exception) -> None:
        """Notes an item, with a warning the first time.

        Raises:
            DataError: No more items may be left out.
        """
        if self.allowed and self.found[index]:
            return
        count = int(self.found.sum())
        if count >= self.allowed:
            after = f' ({self.allowed} others were left out)' if self.allowed else ''
            raise DataError(
                f'{problem}{after}; tools/check_data.py names all such files. Put them right, or '
                'leave up to N out of the training with skip_bad_samples=N in the config'
            ) from error
        self.found[index] = True
        counted = f'{count + 1} of {self.allowed}'
        print_log(f'left out: {problem} ({counted})', 'current', logging.WARNING)


def _bad_file(config: Mapping, dataset: Any, index: int) -> str | None:
    """The problem of an item's image or label map, with its path, or None."""
    try:
        info = dataset.get_data_info(index)
    except Exception:
        # This may be the failure itself.
        return None
    sets = [inner for _, inner in innermost(config, '')]
    if any(map(is_remote, sets)):
        return None
    files = [('img_path', 'images')]
    if any(map(reads_label_maps, sets)):
        files.append(('seg_map_path', 'label maps'))
    for key, kind in files:
        path = info.get(key) if isinstance(info, dict) else None
        problem = read_image(path).problem if isinstance(path, str) else None
        if problem:
            return f'{path!r} is among the {problem.replace("images", kind)}'
    return None
