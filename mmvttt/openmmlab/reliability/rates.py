"""The learning rates of a training before its first step, from its own schedules."""

import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace

from mmengine.optim import OptimWrapper
from mmengine.optim.scheduler import ReduceOnPlateauParamScheduler
from mmengine.optim.scheduler.param_scheduler import LinearParamScheduler
from mmengine.runner import Runner

from mmvttt.errors import UsageError

from .weights import checkpoints_of

# Shorter trainings only try a config out. The schedules of longer ones take seconds to run.
_TRIAL, _LONG = 20, 200_000
# Below this rate random weights do not change in a training, and below this fraction of its full
# rate a training learns little.
_LEAST, _PART = 1e-6, 0.1


def planned_rates(runner: Runner) -> list[float]:
    """The rate at each step of the parameters that learn fastest, as the schedules will set it.

    The schedules run on a copy of the optimizer's parameter group. Schedules that follow a measure
    leave the rate as it is.
    """
    groups = runner.optim_wrapper.param_groups
    first = [group.get('initial_lr', group['lr']) for group in groups]
    number = first.index(max(first))
    group = {name: value for name, value in groups[number].items() if name != 'params'}
    # Schedules warn of an optimizer that does not count its steps.
    counted = SimpleNamespace(_with_counter=True)
    optimizer = SimpleNamespace(param_groups=[group], step=counted, _global_step=0)
    schedules = []
    for schedule in runner.param_schedulers or ():
        if not isinstance(schedule, ReduceOnPlateauParamScheduler):
            schedule = copy.copy(schedule)
            schedule.optimizer = optimizer
            schedule.base_values = [schedule.base_values[number]]
            schedules.append(schedule)
    epoch = max(1, runner.max_iters // runner.max_epochs)
    rates = []
    for step in range(1, runner.max_iters + 1):
        rates.append(group['lr'])
        for schedule in schedules:
            if not schedule.by_epoch or step % epoch == 0:
                schedule.step()
    return rates


def require_learning(runner: Runner) -> None:
    """Logs the highest and the mean rate of a training, unless it resumes or is very long.

    Raises:
        UsageError: Half of the steps warm up, the full rate is never reached, or the first layers
            have random weights that hardly change.
    """
    wrapper, steps = runner.optim_wrapper, runner.max_iters
    if not isinstance(wrapper, OptimWrapper) or not isinstance(runner.param_schedulers, list):
        return
    first = [group.get('initial_lr', group['lr']) for group in wrapper.param_groups]
    if runner.iter == 0 and steps <= _LONG:
        rates = planned_rates(runner)
        highest, mean = max(rates), math.fsum(rates) / steps
        runner.logger.info(
            f'learning rate of {steps} steps: {highest:.3g} at most, {mean:.3g} on average'
        )
        # The first step that is near the highest: rates may stay there.
        peak = next(i for i, rate in enumerate(rates) if rate >= 0.99 * highest)
        if steps >= _TRIAL and (peak * 2 >= steps or highest < _PART * max(first)):
            advice = ' and '.join(_shorter(runner)) or 'another param_scheduler'
            raise UsageError(
                f'the rate of this training is {mean:.2g} on average and {highest:.2g} at most, '
                f'in step {peak + 1} of {steps}, and optim_wrapper has {max(first):.2g}: it warms '
                f'up too long to learn; set {advice}, or train longer; `mmvttt finetune` writes '
                'configs for small sets'
            )
    random = not runner._load_from and not any(checkpoints_of(runner.cfg.model))
    if random and 0 < min(first) < _LEAST:
        # mmvttt.LayerDecayOptimWrapperConstructor needs its rate.
        decay = 'layer_decay_rate' in (runner.cfg.optim_wrapper.get('paramwise_cfg') or ())
        key = 'paramwise_cfg.layer_decay_rate=1.0' if decay else 'paramwise_cfg=None'
        raise UsageError(
            f'the first layers have random weights and a rate of {min(first):.1e}, at which '
            'they never learn: start from weights (init_cfg of the backbone, load_from), or '
            f'set optim_wrapper.{key} and optim_wrapper.optimizer.lr=1e-4 or higher'
        )


def _shorter(runner: Runner) -> Iterator[str]:
    """Entries of the config with which the warm-ups take a twentieth of the training."""
    config = runner.cfg.param_scheduler
    for number, schedule in enumerate(runner.param_schedulers):
        key, options = 'param_scheduler', config
        if isinstance(config, list | tuple):
            key, options = f'{key}.{number}', config[number]
        if hasattr(schedule, 'warmup'):
            # mmvttt.WarmupCosineLR.
            yield f'{key}.warmup_ratio=0.05'
        elif (
            isinstance(schedule, LinearParamScheduler)
            and schedule.start_factor < schedule.end_factor
        ):
            # In the config's unit. In the first epoch or step a schedule has its first rate.
            units = runner.max_epochs if options.get('by_epoch', True) else runner.max_iters
            least = 1 if options.get('convert_to_iter_based') else 2
            yield f'{key}.end={options.get("begin", 0) + max(least, units // 20)}'
