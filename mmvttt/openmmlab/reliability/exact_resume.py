"""Exact resume: a stopped and resumed training ends with the weights of an uninterrupted one.

mmengine resumes with other random numbers and, in the middle of an epoch, with other images. Here a
step's random numbers are a function of (seed, rank, step), and an image's augmentation is a
function of (seed, rank, step, position in the batch), whichever worker loads it. The order of the
data continues at the resumed step, without loading earlier images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mmengine import registry
from mmengine.config import Config, ConfigDict
from mmengine.dataset import DefaultSampler
from mmengine.dist import get_rank, get_world_size
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler, Sampler

from mmvttt.errors import OptionError, OptionTypeError, ResumeError

from ..data.contents import dataset_digest
from ..registry import DATA_SAMPLERS, LOOPS, resolve_type, type_name
from .seeded_dataset import IMAGE, STEP, VALIDATION, Key, seed_everything
from .settings import require_same

# mmengine's loops, by class and by `by_epoch`, and their replacements.
_LOOPS = {
    **dict.fromkeys((EpochBasedTrainLoop, True), 'mmvttt.ExactEpochLoop'),
    **dict.fromkeys((IterBasedTrainLoop, False), 'mmvttt.ExactIterLoop'),
}
# Entries of the message hub, which checkpoints keep. mmengine logs names that begin with
# train, val or test.
SHAPE, DATA_SEED, VALIDATED = 'resume_shape', 'resume_data_seed', 'resume_validated'
STOPPED = 'resume_stopped'
# Digests of the data; 'contents' of earlier versions is another one.
_CONTENTS, _VAL_CONTENTS = 'digest', 'validation digest'


def make_exact(cfg: Config) -> str | None:
    """Puts the loops, sampler and data set of this module into a config, unless it has them.

    Returns why its run cannot be resumed exactly, and then leaves the config unchanged.
    """
    loader, loop = cfg.train_dataloader, cfg.train_cfg
    if not isinstance(loader, ConfigDict) or not isinstance(loop, ConfigDict):
        return 'its data loader or loop is an object, not a config'
    named = loop.get('type', loop.get('by_epoch'))
    kind = resolve_type(named, registry.LOOPS, cfg.get('default_scope'))
    if kind in (ExactEpochLoop, ExactIterLoop):
        return None
    if kind not in _LOOPS:
        names = ', '.join(k.__name__ for k in _LOOPS if isinstance(k, type))
        return f'its loop is {type_name(named)!r}, and {names} can be resumed'
    if not isinstance(loader.get('dataset'), dict) or not isinstance(loader.get('sampler'), dict):
        return 'its data set or sampler is an object, not a config'
    loop.pop('by_epoch', None)
    loop.type = _LOOPS[kind]
    seeded = dict(type='mmvttt.SeededDataset')
    loader.dataset = ConfigDict(seeded, dataset=loader.dataset)
    held_out = cfg.get('val_dataloader')
    if isinstance(held_out, ConfigDict) and isinstance(held_out.get('dataset'), dict):
        # Called only for its errors.
        held_out.dataset = ConfigDict(seeded, dataset=held_out.dataset)
    loader.batch_sampler = ConfigDict(
        type='mmvttt.ExactBatchSampler',
        batch_sampler=loader.get('batch_sampler'),
        drop_last=loader.pop('drop_last', False),
    )
    if cfg.get('model_wrapper_cfg') is None:
        # Else DDP rebuilds its buckets after the first step, also of a resumed run: sums over three
        # or more processes then differ in the last bits.
        cfg.setdefault('find_unused_parameters', True)
    return None


@DATA_SAMPLERS.register_module()
class ExactBatchSampler(Sampler):
    """Batches of another batch sampler, from any step on. Each index has the key of its seed.

    Empty until the loops of this module call `begin`.

    Args:
        sampler, batch_size: Set by mmengine.
        batch_sampler: Config of the batch sampler, or None for torch's.
        drop_last: Without a `batch_sampler`: whether to drop an incomplete batch.
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
        self.batches = BatchSampler(sampler, batch_size, drop_last)
        if batch_sampler is not None:
            self.batches = registry.DATA_SAMPLERS.build(
                batch_sampler, default_args=dict(sampler=sampler, batch_size=batch_size)
            )
        self._plan: tuple[int, Key, bool] | None = None

    def begin(self, step: int, key: Key, endless: bool) -> None:
        """Sets the batches of the next iteration, from a step of the training on.

        `key` has the first numbers of all keys. `endless` continues after the end of an epoch.
        """
        self._plan = step, key, endless

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, Key]]]:
        if self._plan is None:
            return
        step, key, endless = self._plan
        for batch in self._from(step, endless):
            yield [(index, (*key, step, position)) for position, index in enumerate(batch)]
            step += 1

    def _from(self, step: int, endless: bool) -> Iterator[Sequence[int]]:
        if not len(self):
            raise OptionError('the training data has no batch; add images, or lower batch_size')
        # In an iteration-based loop a foreign sampler may be endless.
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


class _ExactLoop(BaseLoop):
    """Shared by both loops: the start, a step's seeds, and a missed validation.

    With `other_data` a resume takes data of other contents than the checkpoint's.
    """

    _iter: int
    val_begin: int
    val_interval: int
    _decide_current_val_interval: Callable[[], None]

    def __init__(self, *args: Any, other_data: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.other_data = other_data

    def _key(self, purpose: int) -> Key:
        """First numbers of this rank's keys, for images, steps or validations."""
        return self.runner.seed, get_rank(), purpose

    def _restore_position(self) -> None:
        """Continues the order of the data from the run that wrote the checkpoint.

        Raises a ResumeError if the steps of the two do not correspond, or the data is another one.
        """
        hub, sampler = self.runner.message_hub, self.dataloader.batch_sampler
        if not isinstance(sampler, ExactBatchSampler):
            raise OptionTypeError(
                f'{type(self).__name__} needs train_dataloader.batch_sampler of type '
                f'mmvttt.ExactBatchSampler, got {type(sampler).__name__}; use tools/train.py, or '
                'call mmvttt.openmmlab.reliability.make_exact(cfg) before the runner is built'
            )
        shape = {
            'processes': get_world_size(),
            'images of a batch': sampler.batch_size,
            'batches of an epoch': len(self.dataloader),
            # The same number of batches may still have other images.
            'images': len(self.dataloader.dataset),
        }
        numbers = {**shape}
        digests = {_CONTENTS: dataset_digest(self.dataloader.dataset) or 'unknown'}
        if self.runner.val_loop is not None:
            held_out = self.runner.val_loop.dataloader.dataset
            numbers['validation images'] = len(held_out)
            digests[_VAL_CONTENTS] = dataset_digest(held_out) or 'unknown'
        before = hub.runtime_info.get(SHAPE, {}) if self._iter else {}
        changed = [f'{k}: {before[k]}, now {v}' for k, v in shape.items() if before.get(k, v) != v]
        others = [name for name, digest in digests.items() if before.get(name, digest) != digest]
        if not changed and _CONTENTS in others and not self.other_data:
            raise ResumeError(
                f'the training data has other contents than at step {self._iter} of the '
                'checkpoint (annotations, labels or pictures)',
                'restore it, or continue with this data by --cfg-options '
                'train_cfg.other_data=True, or start a new training from the weights: '
                'load_from=CHECKPOINT without --resume',
            )
        size = len(self.dataloader)
        if isinstance(self, ExactEpochLoop) and not 0 <= self._iter - self._epoch * size <= size:
            changed.append(f'epoch {self._epoch} of {size} batches')
        if changed:
            raise ResumeError(
                f'step {self._iter} of the checkpoint is another position in the data than here '
                f'({"; ".join(changed)})',
                'restore the old settings, or start a new training from its weights: '
                'load_from=CHECKPOINT without --resume',
            )
        if _VAL_CONTENTS in others:
            self.runner.logger.warning(
                'the validation data has other contents than when the checkpoint was written: '
                'the results before and after it, and the best of them, cannot be compared'
            )
        facts = {f'the number of {name}': str(number) for name, number in numbers.items()}
        require_same(facts | {f'the {name} of the data': text for name, text in digests.items()})
        hub.update_info(SHAPE, {**shape, **digests})
        if self._iter and hub.runtime_info.get(STOPPED):
            self.stop_training = True
            self.runner.logger.info(
                f'a hook has stopped this training at step {self._iter}, such as early stopping; '
                'with other custom_hooks it continues'
            )
        if hasattr(sampler.sampler, 'seed'):
            sampler.sampler.seed = hub.runtime_info.get(DATA_SEED, sampler.sampler.seed)
            hub.update_info(DATA_SEED, sampler.sampler.seed)

    def _validate_if_due(self, done: int, end: int) -> None:
        """Validates if the epochs or steps so far are a multiple of the interval."""
        self._decide_current_val_interval()
        due = done >= self.val_begin and (done % self.val_interval == 0 or done == end)
        if due and self.runner.val_loop is not None:
            seed_everything((*self._key(VALIDATION), self._iter))
            # Before, for the checkpoint that is written again at the end of the validation.
            self.runner.message_hub.update_info(VALIDATED, self._iter)
            self.runner.val_loop.run()

    def _validated(self) -> bool:
        """Whether this step's validation is done, or it is the first step."""
        return self.runner.message_hub.runtime_info.get(VALIDATED, 0) == self._iter


@LOOPS.register_module()
class ExactEpochLoop(_ExactLoop, EpochBasedTrainLoop):
    """mmengine's `EpochBasedTrainLoop` with exact resume, also inside an epoch."""

    def run(self) -> torch.nn.Module:
        """Trains, after a validation that an earlier stop has skipped."""
        self._restore_position()
        self.runner.call_hook('before_train')
        if self._iter == self._epoch * len(self.dataloader) and not self._validated():
            self._validate_if_due(self._epoch, self._max_epochs)
        while self._epoch < self._max_epochs and not self.stop_training:
            self.run_epoch()
            self._validate_if_due(self._epoch, self._max_epochs)
        self.runner.call_hook('after_train')
        return self.runner.model

    def run_epoch(self) -> None:
        """One epoch, or the rest of one."""
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        first = self._iter - self._epoch * len(self.dataloader)
        # Else the checkpoint belongs to the epoch's last step, and the epoch was not finished.
        if first < len(self.dataloader):
            self.dataloader.batch_sampler.begin(self._iter, self._key(IMAGE), endless=False)
            for index, batch in enumerate(self.dataloader, first):
                seed_everything((*self._key(STEP), self._iter))
                self.run_iter(index, batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


@LOOPS.register_module()
class ExactIterLoop(_ExactLoop, IterBasedTrainLoop):
    """mmengine's `IterBasedTrainLoop` with exact resume, without loading earlier data."""

    dataloader_iterator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # mmengine starts an iterator before the first step is known.
        self.dataloader_iterator = None
        self.dataloader._iterator = None

    def run(self) -> torch.nn.Module:
        """Trains, after a validation that an earlier stop has skipped."""
        self._restore_position()
        self.runner.call_hook('before_train')
        self.runner.call_hook('before_train_epoch')
        if not self._validated():
            self._validate_if_due(self._iter, self._max_iters)
        self.dataloader.batch_sampler.begin(self._iter, self._key(IMAGE), endless=True)
        self.dataloader_iterator = iter(self.dataloader)
        while self._iter < self._max_iters and not self.stop_training:
            self.runner.model.train()
            batch = next(self.dataloader_iterator)
            seed_everything((*self._key(STEP), self._iter))
            self.run_iter(batch)
            self._validate_if_due(self._iter, self._max_iters)
        self.runner.call_hook('after_train_epoch')
        self.runner.call_hook('after_train')
        return self.runner.model
