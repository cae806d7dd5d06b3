"""Whether a checkpoint is of the training that would resume from it: model, optimizer, schedules.

mmengine leaves out what does not match, and goes on with weights that are partly random, or with
the checkpoint's learning rate in the place of the config's, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from ..errors import ResumeError
from .match import compare
from .settings import differences, training_settings

# Counters of a scheduler; its other values are settings of a config.
_COUNTED = ('last_step', 'verbose')
_LISTED = 12
_ADVICE = (
    'resume with the config that the checkpoint was made with, or begin a new training from its '
    'weights: load_from=CHECKPOINT without --resume'
)


def watch_resume(runner: Runner, path: str) -> None:
    """Makes `runner` compare the checkpoint that it resumes from with itself, before it loads it.

    Raises (when the runner resumes):
        ResumeError: The checkpoint is of another training, or its entries are not what a training
            has written.
    """
    runner.register_hook(_CompareOnLoad(path), priority='HIGHEST')
    resume = getattr(runner, 'resume', None)
    if resume is None:
        return

    def resume_with_clear_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return resume(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ResumeError):
                raise
            raise ResumeError(
                f'{path!r} cannot be resumed: what it holds is not what a training has written '
                f'({type(error).__name__}: {error})'
            ) from error

    runner.resume = resume_with_clear_errors


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
        changed = list(_changed(runner, checkpoint))
        if changed:
            runner.logger.warning(
                f'the resumed training keeps the settings of the checkpoint: {"; ".join(changed)}. '
                f'To train with those of the config, {_ADVICE.rpartition("or ")[2]}'
            )
        found = differences(checkpoint['meta'].get('settings'), training_settings(runner.cfg))
        if found:
            more = f'; … {len(found) - _LISTED} more' if len(found) > _LISTED else ''
            runner.logger.warning(
                'the training goes on with other settings than those of the checkpoint: '
                f'{"; ".join(found[:_LISTED])}{more}'
            )


def _problems(runner: Runner, checkpoint: Mapping[str, Any]) -> Iterator[str]:
    match checkpoint:
        case {
            'meta': {'epoch': int() as epoch, 'iter': int() as step},
            'state_dict': Mapping() as weights,
            'message_hub': {'log_scalars': Mapping(), 'runtime_info': Mapping()},
        } if epoch >= 0 and step >= 0:
            pass
        case _:
            yield 'has a meta, state_dict or message_hub that no training has written'
            return
    loop = runner.train_loop
    for name, there, end in (('epoch', epoch, loop.max_epochs), ('step', step, loop.max_iters)):
        if there > end:
            yield f'is of {name} {there}, and the training ends at {end}'
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    report = compare(model, weights)
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
        saved = checkpoint.get('param_schedulers')
        count = len(saved) if isinstance(saved, Sequence) else 0
        if count != len(own):
            yield f'has {count} schedules, and the config {len(own)}'


def _saves(runner: Runner, option: str) -> bool:
    return all(getattr(hook, option, True) for hook in runner.hooks)


def _same_optimizer(optimizer: Any, saved: Any) -> bool:
    match saved:
        case {'state': Mapping() as state, 'param_groups': [*groups]}:
            pass
        case _:
            return False
    own = optimizer.param_groups
    if len(groups) != len(own):
        return False
    parameters = [p for group in own for p in group['params']]
    for group, ours in zip(groups, own, strict=True):
        # Schedulers add the initial rate.
        names = {k for k in (*group, *ours) if k not in ('initial_lr', 'initial_momentum')}
        if any(k not in group or k not in ours for k in names):
            return False
        if len(group['params']) != len(ours['params']):
            return False
        # Such as AdamW's decoupled_weight_decay, which Adam has not.
        if any(isinstance(ours[k], bool) and group[k] is not ours[k] for k in names):
            return False
    for index, entry in state.items():
        if not isinstance(index, int) or not 0 <= index < len(parameters):
            return False
        shape = parameters[index].shape
        if any(getattr(v, 'ndim', 0) and v.shape != shape for v in entry.values()):
            return False
    return True


def _changed(runner: Runner, checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Settings that the checkpoint overrides, as `name: checkpoint's (config's)`."""
    if isinstance(runner.optim_wrapper, OptimWrapper) and 'optimizer' in checkpoint:
        groups = checkpoint['optimizer']['param_groups']
        found: dict[str, Any] = {}
        for there, here in zip(groups, runner.optim_wrapper.optimizer.param_groups, strict=True):
            start = there.get('initial_lr', there['lr']), here.get('initial_lr', here['lr'])
            pairs = {k: (there[k], here[k]) for k in there if k in here}
            pairs = {k: v for k, v in pairs.items() if k not in ('params', 'lr', 'initial_lr')}
            for name, (a, b) in {'lr': start, **pairs}.items():
                # A momentum or betas may be on a schedule of their own.
                if isinstance(a, int | float) and a != b and 'momentum' not in name:
                    found.setdefault(name, f'{name}: {a} (config: {b})')
        yield from found.values()
    saved, own = checkpoint.get('param_schedulers'), runner.param_schedulers
    if not isinstance(own, list) or not isinstance(saved, Sequence):
        return
    for there, scheduler in zip(saved, own, strict=True):
        here = scheduler.state_dict()
        for name, value in there.items():
            plain = isinstance(value, int | float | str) and not name.startswith('_')
            if plain and name not in _COUNTED and name in here and here[name] != value:
                kind = type(scheduler).__name__
                yield f'{kind}.{name}: {value} (config: {here[name]})'
