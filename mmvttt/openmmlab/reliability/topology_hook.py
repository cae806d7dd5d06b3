"""Hook that logs nodes, batch size and learning rate at the start of a training."""

from __future__ import annotations

import os

import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from ..registry import HOOKS

# Launchers' variables for the number of nodes; torchrun counts groups.
_NODES = {'pytorch': 'GROUP_WORLD_SIZE', 'slurm': 'SLURM_NNODES'}


@HOOKS.register_module()
class TopologyHook(Hook):
    """Logs a training's nodes, processes, batch and learning rate before it begins.

    Warns if the batch size is not `auto_scale_lr.base_batch_size`, for which the learning rate is
    meant. Skips trainings with several optimizers, or with a sampler of unknown batch size.
    """

    def before_train(self, runner: Runner) -> None:
        """Logs on rank 0."""
        wrapper, loader = runner.optim_wrapper, runner.train_dataloader
        # The data loader's batch size is None if it has a batch sampler.
        size = loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None)
        if runner.rank or not isinstance(wrapper, OptimWrapper) or not size:
            return
        processes, accumulated = runner.world_size, wrapper._accumulative_counts
        images = size * processes * accumulated
        launcher = getattr(runner, 'strategy', runner).launcher
        nodes = int(os.environ.get(_NODES.get(launcher, ''), 1))
        device = 'CPU process' if get_device() == 'cpu' else 'GPU'
        backend = f', {dist.get_backend()}' if is_distributed() else ''
        # Schedulers store their first learning rate as the initial one.
        rates = sorted(
            float(group.get('initial_lr', group['lr'])) for group in wrapper.optimizer.param_groups
        )
        low, high = f'{rates[0]:.3g}', f'{rates[-1]:.3g}'
        text = low if low == high else f'{low} to {high} by parameter'
        scale = runner.cfg.get('auto_scale_lr') or {}
        base, scaled = scale.get('base_batch_size'), bool(scale.get('enable'))
        rate = wrapper.optimizer.defaults['lr']
        if base is not None:
            kind = 'scaled' if scaled else 'not scaled'
            text += f' (configured {rate:.3g} for {_count(base, "image")}, {kind})'
        runner.logger.info(
            f'Topology: {_count(nodes, "node")} × {_count(processes // nodes, device)} '
            f'({_count(processes, "process")}{backend}), {_count(size, "image")} each × '
            f'{processes} × {accumulated} accumulated = {_count(images, "image")} a step, '
            f'learning rate {text}'
        )
        if base is not None and (advice := advise(rate, base, images, accumulated, scaled)):
            runner.logger.warning(advice)


def advise(rate: float, base: int, images: int, accumulated: int, scaled: bool) -> str | None:
    """Advice if a step has another number of images than the config's rate is meant for (`base`).

    `images` are those of all processes and `accumulated` batches; mmengine has scaled the rate by
    the images of one batch.
    """
    if (scaled and accumulated == 1) or (not scaled and images == base):
        return None
    right = f'{rate * images / base:.3g}'
    how = f'set optim_wrapper.optimizer.lr={right}'
    if scaled:
        return (
            f'the learning rate was scaled for {images // accumulated} images, but {accumulated} '
            f'batches are accumulated to {images}: omit --auto-scale-lr and {how}'
        )
    if accumulated == 1:
        how = f'scale it with --auto-scale-lr (to {right})'
    return (
        f'the learning rate {rate:.3g} is meant for {base} images a step, but this run has '
        f'{images}: {how}'
    )


def _count(number: int, noun: str) -> str:
    plural = 'es' if noun.endswith('s') else 's'
    return f'{number} {noun}{"" if number == 1 else plural}'
