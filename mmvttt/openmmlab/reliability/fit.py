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

from mmvttt.checkpoints.match import compare
from mmvttt.errors import ResumeError

from .settings import differences, training_settings

_LISTED = 12
_ADVICE = (
    'resume with the config that the checkpoint was made with, or begin a new training from its '
    'weights: load_from=CHECKPOINT without --resume'
)


class CompareOnLoad(Hook):
    """Compares the checkpoint that a runner resumes from with it, before it is loaded.

    Args:
        path: Of the checkpoint, for the messages.

    Raises:
        ResumeError: When the runner resumes: the checkpoint is of another training.
    """

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
        for text, found in (
            (
                'the resumed training keeps the settings of the checkpoint (to train with others: '
                'load_from=CHECKPOINT without --resume)',
                restored,
            ),
            ('the training goes on with other settings than those of the checkpoint', others),
        ):
            if found:
                more = f'; … {len(found) - _LISTED} more' if len(found) > _LISTED else ''
                runner.logger.warning(f'{text}: {"; ".join(found[:_LISTED])}{more}')


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
        elif not _same_groups(runner.optim_wrapper.optimizer.param_groups, checkpoint['optimizer']):
            yield f'is of another optimizer than {type(runner.optim_wrapper.optimizer).__name__}'
    if 'ema_state_dict' in checkpoint and not any(isinstance(h, EMAHook) for h in runner.hooks):
        yield (
            'has averaged weights, and the optimizer of those that were trained; without an '
            'EMAHook the training would go on from the average'
        )
    # None without schedules; a dict of several optimizers' is left alone.
    own = runner.param_schedulers or []
    if isinstance(own, list) and _saves(runner, 'save_param_scheduler'):
        count = len(checkpoint.get('param_schedulers') or ())
        if count != len(own):
            yield f'has {count} schedules, and the config {len(own)}'


def _saves(runner: Runner, option: str) -> bool:
    return all(getattr(hook, option, True) for hook in runner.hooks)


def _same_groups(own: list[dict], saved: Mapping[str, Any]) -> bool:
    """Whether groups of parameters have the sizes and options of the optimizer's."""

    def options(group: Mapping[str, Any]) -> dict[str, Any]:
        # Schedulers add the initial rate. Flags tell AdamW from Adam.
        kept = {k: v for k, v in group.items() if k not in ('initial_lr', 'initial_momentum')}
        flags = {k: v if isinstance(v, bool) else None for k, v in kept.items()}
        return {**flags, 'params': len(group['params'])}

    return list(map(options, own)) == list(map(options, saved['param_groups']))
