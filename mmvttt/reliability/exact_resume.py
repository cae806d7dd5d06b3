"""Training that a stop does not change: what a step does depends on its number, not on its past.

mmengine goes on after a stop with other random numbers and, in the middle of an epoch, with other
images. Here the random numbers of a step are a function of (seed, rank, step), those of an image's
augmentation of (seed, rank, step, place in the batch), whichever worker loads it; and the order of
the data is taken up at the step where it was left, without loading what went before. A run that was
killed and resumed then ends with the weights of a run never disturbed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from mmengine import registry
from mmengine.config import Config, ConfigDict
from mmengine.dataset import DefaultSampler
from mmengine.dist import get_rank, get_world_size
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler, Sampler

from ..errors import DataError, ResumeError
from ..registry import DATA_SAMPLERS, DATASETS, LOOPS, resolve_type, type_name
from .agreement import require_same
from .data.annotations import (
    explain_failure,
    innermost,
    is_remote,
    reads_label_maps,
)
from .data.images import read_image

# mmengine's loops, by class and by `by_epoch`, and what takes their place.
_LOOPS = {
    EpochBasedTrainLoop: 'mmvttt.ExactEpochLoop',
    IterBasedTrainLoop: 'mmvttt.ExactIterLoop',
    True: 'mmvttt.ExactEpochLoop',
    False: 'mmvttt.ExactIterLoop',
}
# What the loops keep in the checkpoint, in the message hub. mmengine logs names that begin with
# train, val or test.
_SHAPE, _DATA_SEED, _VALIDATED = 'resume_shape', 'resume_data_seed', 'resume_validated'

# What random numbers are for.
_IMAGE, _STEP, _VALIDATION = range(3)

Key = tuple[int, ...]


def seed_everything(key: Key) -> None:
    """Seeds `random`, NumPy and torch (every device) from a few non-negative integers."""
    python, numpy, torch_ = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(python))
    np.random.seed(numpy)
    if _has_accelerator():
        torch.manual_seed(int(torch_))
    else:
        # The same without a note, with the stack, for each kind of device that might be added yet:
        # milliseconds an image.
        torch.default_generator.manual_seed(int(torch_))


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def make_exact(cfg: Config) -> str | None:
    """Puts the loops, sampler and data set of this module into the config of a training.

    Does nothing to a config that has them already.

    Returns:
        None, or why the run of this config cannot be resumed exactly: it is left as it is then.
    """
    loader, loop = cfg.train_dataloader, cfg.train_cfg
    if not isinstance(loader, dict) or not isinstance(loop, dict):
        return 'its data loader or loop is an object, not a config'
    named = loop.get('type', loop.get('by_epoch'))
    kind = resolve_type(named, registry.LOOPS, cfg.get('default_scope'))
    if kind in (ExactEpochLoop, ExactIterLoop):
        return None
    if kind not in _LOOPS:
        known = ', '.join(k.__name__ for k in _LOOPS if isinstance(k, type))
        return f'its loop is {type_name(named)!r}; known: {known}'
    if not isinstance(loader.get('dataset'), dict) or not isinstance(loader.get('sampler'), dict):
        return 'its data set or sampler is an object, not a config'
    loop.pop('by_epoch', None)
    loop.type = _LOOPS[kind]
    loader.dataset = ConfigDict(
        type='mmvttt.SeededDataset',
        dataset=loader.dataset,
        skip_bad_samples=cfg.get('skip_bad_samples', 0),
    )
    held_out = cfg.get('val_dataloader')
    if isinstance(held_out, dict) and isinstance(held_out.get('dataset'), dict):
        # For its errors alone.
        held_out.dataset = ConfigDict(type='mmvttt.SeededDataset', dataset=held_out.dataset)
    loader.batch_sampler = ConfigDict(
        type='mmvttt.ExactBatchSampler',
        batch_sampler=loader.get('batch_sampler'),
        drop_last=loader.pop('drop_last', False),
    )
    if cfg.get('model_wrapper_cfg') is None:
        # Else DDP rearranges its buckets after the first step, of a resumed run too: sums over
        # three or more processes then end in other last bits.
        cfg.setdefault('find_unused_parameters', True)
    return None


@DATASETS.register_module()
class SeededDataset:
    """A data set whose item number i, asked for as `(i, key)`, is a function of i and key.

    In all else it is the data set that it wraps: attributes are read from it and set on it, and an
    item asked for by its number alone is the one that it gives.

    Args:
        dataset: Config of the data set.
        skip_bad_samples: So many items of a process, whose images cannot be read, are replaced by
            the next good one, with a warning each.

    Raises:
        DataError: The data set cannot be built, or an item not be loaded, and that is the fault of
            an annotation, an image or a label map: names it.
    """

    def __init__(self, dataset: dict, skip_bad_samples: int = 0) -> None:
        object.__setattr__(self, '_config', dataset)
        try:
            built = registry.DATASETS.build(dataset)
        except Exception as error:
            # Whatever a toolbox raises that meets what it does not expect.
            explained = explain_failure(dataset, error)
            if explained is None:
                raise
            raise explained from error
        object.__setattr__(self, '_dataset', built)
        object.__setattr__(self, '_left', skip_bad_samples)
        # Which items were bad; data workers share it.
        bad = torch.zeros(len(self._dataset) if skip_bad_samples else 0, dtype=torch.bool)
        object.__setattr__(self, '_bad', bad.share_memory_() if skip_bad_samples else bad)

    def __getitem__(self, index: int | tuple[int, Key]) -> Any:
        index, key = index if isinstance(index, tuple) else (index, None)
        for _ in range(len(self)):
            if key is not None:
                seed_everything(key)
            try:
                return self._dataset[index]
            except Exception as error:
                bad = self._bad_file(index)
                if bad is not None:
                    self._skip(index, bad, error)
                elif explained := explain_failure(self._config, error):
                    raise explained from error
                else:
                    raise
            index = (index + 1) % len(self)
        raise DataError('no image of the training data can be read')

    def _bad_file(self, index: int) -> str | None:
        """What is wrong with the image or label map of an item, if it is one of them."""
        try:
            info = self._dataset.get_data_info(index)
        except Exception:
            # It may be what has failed.
            return None
        sets = [config for _, config in innermost(self._config, '')]
        if any(map(is_remote, sets)):
            return None
        files = [('img_path', 'images')]
        if any(map(reads_label_maps, sets)):
            files.append(('seg_map_path', 'label maps'))
        for key, what in files:
            path = info.get(key) if isinstance(info, dict) else None
            problem = read_image(path).problem if isinstance(path, str) else None
            if problem:
                return f'{path!r} is among the {problem.replace("images", what)}'
        return None

    def _skip(self, index: int, bad: str, error: Exception) -> None:
        new = not self._left or not self._bad[index]
        if new and int(self._bad.sum()) >= self._left:
            after = f' ({self._left} others were left out)' if self._left else ''
            raise DataError(
                f'{bad}{after}; tools/check_data.py names all such files. Put them right, or leave '
                'up to N out of the training with skip_bad_samples=N in the config'
            ) from error
        if new:
            self._bad[index] = True
            count = f'{int(self._bad.sum())} of {self._left}'
            print_log(f'left out: {bad} ({count})', 'current', logging.WARNING)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        # Pickle asks for special methods before there is anything to hand on to.
        if name.startswith('__') or name == '_dataset':
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@DATA_SAMPLERS.register_module()
class ExactBatchSampler(Sampler):
    """Batches of another batch sampler, from any step on, each index with the key of its seed.

    Yields nothing before `begin`, which the loops of this module call.

    Args:
        sampler: Yields indices; filled in by mmengine.
        batch_size: Images of a batch and process; filled in by mmengine.
        batch_sampler: Config of the batch sampler; None: torch's.
        drop_last: Without a `batch_sampler`: whether to leave an incomplete batch out.
    """

    def __init__(
        self,
        sampler: Sampler,
        batch_size: int,
        batch_sampler: dict | None = None,
        drop_last: bool = False,
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.batches = (
            BatchSampler(sampler, batch_size, drop_last)
            if batch_sampler is None
            else registry.DATA_SAMPLERS.build(
                batch_sampler, default_args=dict(sampler=sampler, batch_size=batch_size)
            )
        )
        self._plan: tuple[int, Key, bool] | None = None

    def begin(self, step: int, key: Key, endless: bool) -> None:
        """Sets what the next iteration over this sampler yields.

        Args:
            step: Number of the first batch, counted from the beginning of the training.
            key: Beginning of all keys.
            endless: Whether to go on after the end of an epoch.
        """
        self._plan = step, key, endless

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, Key]]]:
        if self._plan is None:
            return
        step, key, endless = self._plan
        for batch in self._from(step, endless):
            yield [(index, (*key, step, place)) for place, index in enumerate(batch)]
            step += 1

    def _from(self, step: int, endless: bool) -> Iterator[Sequence[int]]:
        if not len(self):
            raise ValueError('the training data has no batch; add images, or lower batch_size')
        # Of an unknown sampler in an iteration-based loop nobody knows whether it has an end.
        jumps = not endless or isinstance(self.sampler, DefaultSampler)
        epoch, skipped = divmod(step, len(self)) if jumps else (0, step)
        while True:
            if hasattr(self.sampler, 'set_epoch'):
                self.sampler.set_epoch(epoch)
            yielded = 0
            for yielded, batch in enumerate(self.batches, 1):
                if yielded > skipped:
                    yield batch
            if not endless:
                return
            epoch, skipped = epoch + 1, max(0, skipped - yielded)


class _Exact:
    """What both loops do at the beginning, at each step, and about a validation that was missed."""

    def _key(self, purpose: int) -> Key:
        """Beginning of the keys of this rank, for images, steps or validations."""
        return self.runner.seed, get_rank(), purpose

    def _begin(self, endless: bool) -> None:
        """Makes the next iterator of the data begin at this step."""
        self.dataloader.batch_sampler.begin(self._iter, self._key(_IMAGE), endless)

    def _seed_step(self) -> None:
        seed_everything((*self._key(_STEP), self._iter))

    def _take_up(self) -> None:
        """Compares with the other ranks and with the run that wrote the checkpoint, whose order
        of the data it takes over.

        Raises:
            UsageError: Another rank has other lengths: one of them would wait for ever.
            ResumeError: A step of this run is not a step of that one.
        """
        hub, sampler = self.runner.message_hub, self.dataloader.batch_sampler
        if not isinstance(sampler, ExactBatchSampler):
            raise TypeError(
                f'{type(self).__name__} needs train_dataloader.batch_sampler of type '
                f'mmvttt.ExactBatchSampler, got {type(sampler).__name__}; use tools/train.py, or '
                'call mmvttt.reliability.make_exact(cfg) before the runner is built'
            )
        shape = {
            'processes': get_world_size(),
            'images of a batch': sampler.batch_size,
            'batches of an epoch': len(self.dataloader),
            # With as many batches another image may be in each of them.
            'images': len(self.dataloader.dataset),
        }
        if self._iter:
            before = hub.runtime_info.get(_SHAPE, shape)
            before = before if isinstance(before, dict) else {}
            changed = [
                f'{k}: {before[k]}, now {v}' for k, v in shape.items() if before.get(k, v) != v
            ]
            if changed:
                raise ResumeError(
                    f'step {self._iter} of the checkpoint is another place in the data than here '
                    f'({"; ".join(changed)}); go on with what it was, or begin a new training from '
                    'its weights: load_from=CHECKPOINT without --resume'
                )
        lengths = {f'the number of {name}': str(number) for name, number in shape.items()}
        if self.runner.val_loop is not None:
            held_out = len(self.runner.val_loop.dataloader.dataset)
            lengths['the number of images to validate with'] = str(held_out)
        require_same(lengths)
        hub.update_info(_SHAPE, shape)
        if hasattr(sampler.sampler, 'seed'):
            seed = hub.runtime_info.get(_DATA_SEED, sampler.sampler.seed)
            if not isinstance(seed, int):
                raise ResumeError(
                    f'the checkpoint keeps {seed!r} as the seed of its data, which is not a number '
                    'that a training has written; resume from another checkpoint'
                )
            sampler.sampler.seed = seed
            hub.update_info(_DATA_SEED, seed)

    def _validate_if_due(self, due: bool) -> None:
        if due and self.runner.val_loop is not None:
            seed_everything((*self._key(_VALIDATION), self._iter))
            self.runner.val_loop.run()
            self.runner.message_hub.update_info(_VALIDATED, self._iter)

    def _validated(self) -> bool:
        """Whether this step has had its validation, or is the first one."""
        return self.runner.message_hub.runtime_info.get(_VALIDATED, 0) == self._iter


@LOOPS.register_module()
class ExactEpochLoop(_Exact, EpochBasedTrainLoop):
    """mmengine's `EpochBasedTrainLoop`, which also resumes exactly, and inside of an epoch."""

    def run(self) -> torch.nn.Module:
        """Trains; a validation that a stop has swallowed comes first."""
        self.runner.call_hook('before_train')
        self._take_up()
        if self._iter == self._epoch * len(self.dataloader) and not self._validated():
            self._decide_current_val_interval()
            self._validate_if_due(self._due())
        while self._epoch < self._max_epochs and not self.stop_training:
            self.run_epoch()
            self._decide_current_val_interval()
            self._validate_if_due(self._due())
        self.runner.call_hook('after_train')
        return self.runner.model

    def run_epoch(self) -> None:
        """One epoch, or the rest of one."""
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        first = self._iter - self._epoch * len(self.dataloader)
        # Else the checkpoint is of the last step of the epoch, whose end was not reached.
        if first < len(self.dataloader):
            self._begin(endless=False)
            for index, batch in enumerate(self.dataloader, first):
                self._seed_step()
                self.run_iter(index, batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1

    def _due(self) -> bool:
        at_end = self._epoch == self._max_epochs
        return self._epoch >= self.val_begin and (self._epoch % self.val_interval == 0 or at_end)


@LOOPS.register_module()
class ExactIterLoop(_Exact, IterBasedTrainLoop):
    """mmengine's `IterBasedTrainLoop`, which also resumes exactly, without loading what is past."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # mmengine has started an iterator, before anybody knows where the training begins.
        self.dataloader_iterator = None
        self.dataloader._iterator = None

    def run(self) -> torch.nn.Module:
        """Trains; a validation that a stop has swallowed comes first."""
        self.runner.call_hook('before_train')
        self.runner.call_hook('before_train_epoch')
        self._take_up()
        if not self._validated():
            self._decide_current_val_interval()
            self._validate_if_due(self._due())
        self._begin(endless=True)
        self.dataloader_iterator = iter(self.dataloader)
        while self._iter < self._max_iters and not self.stop_training:
            self.runner.model.train()
            batch = next(self.dataloader_iterator)
            self._seed_step()
            self.run_iter(batch)
            self._decide_current_val_interval()
            self._validate_if_due(self._due())
        self.runner.call_hook('after_train_epoch')
        self.runner.call_hook('after_train')
        return self.runner.model

    def _due(self) -> bool:
        at_end = self._iter == self._max_iters
        return self._iter >= self.val_begin and (self._iter % self.val_interval == 0 or at_end)
