"""Whether a checkpoint is of the training that would resume from it: model, optimizer, schedules.

mmengine leaves out what does not match, and goes on with weights that are partly random, or with
the checkpoint's learning rate in the place of the config's, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from ..errors import ResumeError
from .match import compare
from .settings import differences, training_settings

_LISTED = 12
_ADVICE = (
    'resume with the config that the checkpoint was made with, or begin a new training from its '
    'weights: load_from=CHECKPOINT without --resume'
)


def watch_resume(runner: Runner, path: str) -> None:
    """Makes `runner` compare the checkpoint that it resumes from with itself, before it loads it.

    Raises (when the runner resumes):
        ResumeError: The checkpoint is of another training.
    """
    runner.register_hook(_CompareOnLoad(path), priority='HIGHEST')


class _CompareOnLoad(Hook):
    def __init__(self, path: str) -> None:
        self.path = path

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # FlexibleRunner's model and optimizer are wrapped and sharded by its strategy.
        if not (isinstance(runner, Runner) and runner._resume):
            return
        problem = next(_problems(runner, checkpoint), None)
        if problem:
            raise ResumeError(f'{self.path!r} {problem}; {_ADVICE}')
        restored, others = differences(
            checkpoint['meta'].get('settings'), training_settings(runner.cfg)
        )
        if restored:
            runner.logger.warning(
                f'the resumed training keeps the settings of the checkpoint: {_listed(restored)}. '
                f'To train with those of the config, {_ADVICE.rpartition("or ")[2]}'
            )
        if others:
            runner.logger.warning(
                'the training goes on with other settings than those of the checkpoint: '
                f'{_listed(others)}'
            )


def _listed(found: list[str]) -> str:
    more = f'; … {len(found) - _LISTED} more' if len(found) > _LISTED else ''
    return f'{"; ".join(found[:_LISTED])}{more}'


def _problems(runner: Runner, checkpoint: Mapping[str, Any]) -> Iterator[str]:
    loop, meta = runner.train_loop, checkpoint['meta']
    for name, end in (('epoch', loop.max_epochs), ('iter', loop.max_iters)):
        if meta[name] > end:
            yield f'is of {name} {meta[name]}, and the training ends at {end}'
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    report = compare(model, checkpoint['state_dict'])
    different = [*report.mismatched, *report.missing, *report.unexpected]
    if different:
        yield (
            f'is of another model: {len(different)} of its tensors are not those of this one '
            f'({", ".join(different[:3])}{", …" if len(different) > 3 else ""})'
        )
    if isinstance(runner.optim_wrapper, OptimWrapper) and _saves(runner, 'save_optimizer'):
        if 'optimizer' not in checkpoint:
            yield (
                'has no optimizer and no schedule, as best_*.pth have none: it holds weights to '
                'load, not a training to resume'
            )
        elif not _same_optimizer(runner.optim_wrapper.optimizer, checkpoint['optimizer']):
            yield f'is of another optimizer than {type(runner.optim_wrapper.optimizer).__name__}'

    has_average = any(isinstance(hook, EMAHook) for hook in runner.hooks)
    if 'ema_state_dict' in checkpoint and not has_average:
        yield (
            'has averaged weights, and the optimizer of those that were trained; without an '
            'EMAHook the training would go on from the average'
        )
    own = runner.param_schedulers
    if isinstance(own, list) and _saves(runner, 'save_param_scheduler'):
        count = len(checkpoint.get('param_schedulers') or ())
        if count != len(own):
            yield f'has {count} schedules, and the config {len(own)}'


def _saves(runner: Runner, option: str) -> bool:
    return all(getattr(hook, option, True) for hook in runner.hooks)


def _same_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> bool:
    """Whether groups, their options, and the shapes of their states are those of the optimizer."""
    own = optimizer.param_groups
    if [len(g['params']) for g in saved['param_groups']] != [len(g['params']) for g in own]:
        return False
    for there, here in zip(saved['param_groups'], own, strict=True):
        # Schedulers add the initial rate.
        ignored = {'initial_lr', 'initial_momentum'}
        if there.keys() - ignored != here.keys() - ignored:
            return False
        # Such as AdamW's decoupled_weight_decay, which Adam has not.
        if any(isinstance(v, bool) and there[k] is not v for k, v in here.items()):
            return False
    parameters = [p for group in own for p in group['params']]
    return all(
        getattr(value, 'ndim', 0) == 0 or value.shape == parameters[index].shape
        for index, entry in saved['state'].items()
        for value in entry.values()
    )
