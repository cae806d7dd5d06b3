"""Compares a checkpoint with a training: with the one that resumes from it, and its weights.

mmengine silently skips what does not match, and trains from partly random weights, or with the
checkpoint's learning rate instead of the config's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import numpy as np
import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import Tensor

from mmvttt.checkpoints.download import without_secrets
from mmvttt.checkpoints.load import compare, require_some, require_whole
from mmvttt.checkpoints.preparation import of_preprocessor, saved_preparation, warn_of_other_images
from mmvttt.checkpoints.read import named_tensors, saved_classes
from mmvttt.errors import CheckpointMismatchError, ResumeError
from mmvttt.text import listed, one_line

from ..data.dataset_config import preparation_of
from ..unwrap import bare_model
from .exact_resume import DATA_SEED, SHAPE, STOPPED, VALIDATED
from .hook_state import kind_of
from .rates import require_learning
from .settings import differences, training_settings, warn_of_other_model
from .weights import warning_of_random_weights

# Beginnings of names in the message hub that a training computes with, and their types.
_COMPUTED: Mapping[str, type | UnionType] = {
    'best_score': int | float | np.number | Tensor,
    DATA_SEED: int,
    VALIDATED: int,
    STOPPED: bool,
    SHAPE: dict,
}
_ADVICE = (
    'resume with the config that the checkpoint was made with, or start a new training from its '
    'weights: load_from=CHECKPOINT without --resume'
)


class CompareOnLoad(Hook):
    """Hook that raises a ResumeError before a checkpoint of another training is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # FlexibleRunner's model and optimizer are wrapped and sharded by its strategy.
        if not (isinstance(runner, Runner) and runner._resume):
            return
        for name in _drop_unusable(checkpoint['message_hub']['runtime_info']):
            runner.logger.warning(f'{self.path!r}: left out message_hub.runtime_info.{name}')
        problem = next(_problems(runner, checkpoint), None)
        if problem:
            raise ResumeError(f'{self.path!r} {problem}', _ADVICE)
        restored, others = differences(
            checkpoint['meta'].get('settings'), training_settings(runner.cfg)
        )
        if any(text.startswith('custom_hooks') for text in others):
            # Another patience, or none, may go further.
            checkpoint['message_hub']['runtime_info'].pop(STOPPED, None)
        for text, changes in (
            (
                'the resumed training keeps the settings of the checkpoint (to train with others: '
                'load_from=CHECKPOINT without --resume)',
                restored,
            ),
            ("the settings of the resumed training differ from the checkpoint's", others),
        ):
            if changes:
                runner.logger.warning(f'{text}: {listed(changes, 12, 300)}')


def _drop_unusable(info: dict) -> Iterator[str]:
    """Drops entries of a message hub that a training cannot use, and yields their names."""
    for name in list(info):
        text = isinstance(name, str)
        kinds = [kind for start, kind in _COMPUTED.items() if text and name.startswith(start)]
        if not text or (kinds and not isinstance(info[name], kinds[0])):
            yield one_line(f'{name} = {info.pop(name)!r:.80}')


def _problems(runner: Runner, checkpoint: Mapping[str, Any]) -> Iterator[str]:
    loop, meta = runner.train_loop, checkpoint['meta']
    for name, end in (('epoch', loop.max_epochs), ('iter', loop.max_iters)):
        if meta[name] > end:
            yield f'is from {name} {meta[name]}, but the training ends at {end}'
    model = bare_model(runner.model)
    report = compare(model, checkpoint['state_dict'])
    different = [*report.mismatched, *report.missing, *report.unexpected]
    if different:
        yield (
            f'is from another model: {len(different)} of its tensors do not match this one '
            f'({listed(different, 3, 200)})'
        )
    if isinstance(runner.optim_wrapper, OptimWrapper) and _saves(runner, 'save_optimizer'):
        if 'optimizer' not in checkpoint:
            yield (
                'has no optimizer and no schedule, like any best_*.pth: it holds weights to load, '
                'not a training to resume'
            )
        elif not _same_groups(runner.optim_wrapper.optimizer.param_groups, checkpoint['optimizer']):
            yield f'is from another optimizer than {type(runner.optim_wrapper.optimizer).__name__}'
    if 'ema_state_dict' in checkpoint and not any(isinstance(h, EMAHook) for h in runner.hooks):
        yield (
            'has averaged weights, and the optimizer state of the trained ones; without an '
            'EMAHook the training would continue from the average'
        )
    # None without schedules; a dict for several optimizers is not checked.
    schedules = runner.param_schedulers or []
    if isinstance(schedules, list) and _saves(runner, 'save_param_scheduler'):
        states = checkpoint.get('param_schedulers', ())
        if len(states) != len(schedules):
            yield f'has {len(states)} schedules, but the config has {len(schedules)}'
        for state, schedule in zip(states, schedules, strict=False):
            # mmengine sets whatever attributes the checkpoint names.
            if not _same_kinds(state, schedule.state_dict()):
                yield f'has a schedule that is no {type(schedule).__name__}'


def _saves(runner: Runner, option: str) -> bool:
    return all(getattr(hook, option, True) for hook in runner.hooks)


def _same_groups(groups: list[dict], saved: Mapping[str, Any]) -> bool:
    """Whether parameter groups have the sizes and options of the optimizer's groups."""

    def options(group: Mapping[str, Any]) -> dict[str, Any]:
        # Schedulers add the initial rate. Flags distinguish AdamW from Adam.
        flags = {k: v if isinstance(v, bool) else kind_of(v) for k, v in group.items()}
        flags = {k: v for k, v in flags.items() if k not in ('initial_lr', 'initial_momentum')}
        return {**flags, 'params': len(group['params'])}

    return list(map(options, groups)) == list(map(options, saved['param_groups']))


def _same_kinds(state: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(name in now and kind_of(x) == kind_of(now[name]) for name, x in state.items())


def require_weights(runner: Runner, content: Any, source: str, whole: bool = False) -> None:
    """Compares the `content` of the checkpoint `source` with a runner's model, and its images.

    See `require_some`, or with `whole` `require_whole`; then it has the classes of the test set.
    """
    source = one_line(without_secrets(source))
    if isinstance(runner.model, dict):
        # FlexibleRunner builds the model later; here names and shapes suffice.
        with torch.device('meta'):
            model = MODELS.build(runner.model)
    else:
        model = bare_model(runner.model)
        preprocessor = getattr(model, 'data_preprocessor', None)
        here = preparation_of(runner.cfg, 'test' if whole else 'train', preprocessor)
        warn_of_other_images(source, saved_preparation(content), here)
    (require_whole if whole else require_some)(model, named_tensors(content, source), source)
    if whole:
        warn_of_other_model(content, runner.cfg, source)
        # Last: another model says more than other classes.
        metainfo = getattr(runner.test_dataloader.dataset, 'metainfo', {})
        require_same_classes(content, source, metainfo.get('classes'))


def require_same_classes(content: Any, source: str, classes: Sequence[str] | None) -> None:
    """Compares the classes that a checkpoint was trained for with a data set's.

    Raises:
        CheckpointMismatchError: A class has another number here.
    """
    saved = saved_classes(content)
    if not saved or classes is None or saved == tuple(classes):
        return
    numbers = {name: i for i, name in enumerate(saved)}
    for i, name in enumerate(classes):
        if numbers.get(name, i) != i:
            raise CheckpointMismatchError(
                f'{name!r} is class {numbers[name]} of {source!r} and class {i} of the '
                f'data: set metainfo=dict(classes={saved}) in the data sets'
            )
    if not numbers.keys() & {*classes}:
        text = f'{source} was trained for classes of other names: {listed(saved)}'
        print_log(text, 'current', logging.WARNING)


class WarnAtStart(Hook):
    """Warns of a learning rate and of weights that do not fit a training.

    Raises a UsageError for a training that ends before it learns.
    """

    def before_train(self, runner: Runner) -> None:
        """Logs the warnings."""
        require_learning(runner)
        random = warning_of_random_weights(runner.cfg, runner._load_from)
        for warning in (_of_another_batch(runner), random):
            if warning:
                runner.logger.warning(warning)
        model = bare_model(runner.model)
        preprocessor = getattr(model, 'data_preprocessor', None)
        here, held_out = (preparation_of(runner.cfg, x, preprocessor) for x in ('train', 'val'))
        if runner.val_loop is not None and here is not None:
            warn_of_other_images('the training', of_preprocessor(here), held_out)
        for name, part in model.named_modules():
            warn_of_other_images(f'model.{name}', getattr(part, 'preparation', None), here)


def _of_another_batch(runner: Runner) -> str | None:
    """A warning if a step's images are not those that the learning rate is for."""
    wrapper, loader = runner.optim_wrapper, runner.train_dataloader
    size = loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None)
    scale = runner.cfg.get('auto_scale_lr') or {}
    if not (isinstance(wrapper, OptimWrapper) and size and 'base_batch_size' in scale):
        return None
    accumulated = wrapper._accumulative_counts
    images, base = size * runner.world_size * accumulated, scale['base_batch_size']
    # mmengine scales the rate by the images of one batch.
    fitting = images // accumulated if scale.get('enable') else base
    if images == fitting:
        return None
    rate = wrapper.optimizer.defaults['lr']
    return (
        f'the learning rate {rate * fitting / base:.3g} is meant for {fitting} images a step, but '
        f'this run has {images}: without --auto-scale-lr, set '
        f'optim_wrapper.optimizer.lr={rate * images / base:.3g} and '
        f'auto_scale_lr.base_batch_size={images}'
    )
