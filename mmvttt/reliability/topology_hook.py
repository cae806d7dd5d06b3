"""A line at the start of a training: its machines, its batch, its learning rate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner

from ..registry import HOOKS


@dataclass(frozen=True)
class Topology:
    """The processes of a training, its batch and its learning rates.

    Attributes:
        nodes: Machines.
        processes: All of them; one for each GPU.
        backend: Backend of torch.distributed; None for a single process by itself.
        on_cpu: Whether the model is on the CPU.
        batch_size: Images of a process in one forward pass; None where its sampler does not say.
        accumulated: Forward passes of a step.
        configured: Learning rate of the config; None where every group has one of its own.
        rates: Learning rates of the parameters, the lowest first, before a warm-up.
        base_batch_size: Images of a step that the configured rate is meant for, if configured.
        scaled: Whether the rate was scaled from those to the images of a step.
    """

    nodes: int
    processes: int
    backend: str | None
    on_cpu: bool
    batch_size: int | None
    accumulated: int
    configured: float | None
    rates: tuple[float, ...]
    base_batch_size: int | None
    scaled: bool

    @property
    def images(self) -> int | None:
        """Images of a step, over all processes and accumulated passes."""
        return self.batch_size and self.batch_size * self.processes * self.accumulated

    def __str__(self) -> str:
        each, rest = divmod(self.processes, self.nodes)
        device = 'CPU process' if self.on_cpu else 'GPU'
        devices = _count(self.processes, device) + ' in all' if rest else _count(each, device)
        backend = f', {self.backend}' if self.backend else ''
        batch = 'batches of a size that their sampler does not say'
        if self.batch_size and self.images:
            batch = (
                f'{_count(self.batch_size, "image")} each × {self.processes} × {self.accumulated} '
                f'accumulated = {_count(self.images, "image")} a step'
            )
        low, high = f'{self.rates[0]:.3g}', f'{self.rates[-1]:.3g}'
        rate = low if low == high else f'{low} to {high} by parameter'
        if self.base_batch_size is not None and self.configured is not None:
            rate += (
                f' (configured {self.configured:.3g} for {_count(self.base_batch_size, "image")}, '
                f'{"scaled" if self.scaled else "not scaled"})'
            )
        return (
            f'{_count(self.nodes, "node")} × {devices} ({_count(self.processes, "process")}'
            f'{backend}), {batch}, learning rate {rate}'
        )

    def advice(self) -> str | None:
        """Advice where a step has other images than the learning rate is meant for."""
        base, images = self.base_batch_size, self.images
        if base is None or images is None or not self.configured:
            return None
        if self.accumulated == 1 if self.scaled else images == base:
            return None
        rate = f'{self.configured * images / base:.3g}'
        if self.scaled:
            return (
                f'the learning rate was scaled for {images // self.accumulated} images, but '
                f'{self.accumulated} batches are accumulated to {images}: leave --auto-scale-lr '
                f'out and set optim_wrapper.optimizer.lr={rate}'
            )
        scale = f'set optim_wrapper.optimizer.lr={rate}'
        if self.accumulated == 1:
            scale = f'scale it with --auto-scale-lr (to {rate})'
        per_process = base / (self.processes * self.accumulated)
        keep = f', or keep {base} images with train_dataloader.batch_size={per_process:.0f}'
        return (
            f'the learning rate {self.configured:.3g} is meant for {base} images a step, and '
            f'this run has {images}: {scale}{keep if per_process.is_integer() else ""}'
        )


def count_nodes(environment: Mapping[str, str], launcher: str, processes: int) -> int:
    """Number of machines of a run, from the variables that its launcher sets in every process.

    Args:
        environment: The process's variables.
        launcher: 'none', 'pytorch', 'slurm' or 'mpi'.
        processes: All of them.
    """
    if launcher == 'pytorch':
        # torchrun's: its groups are the nodes. Under slurm too, where it is one task a node.
        return int(environment.get('GROUP_WORLD_SIZE', 1))
    if launcher == 'slurm':
        return int(environment.get('SLURM_NNODES', 1))
    if launcher == 'mpi':
        return -(-processes // int(environment.get('OMPI_COMM_WORLD_LOCAL_SIZE', processes)))
    return 1


def topology(runner: Runner) -> Topology:
    """The topology of a Runner or FlexibleRunner that is about to train."""
    wrapper = runner.optim_wrapper
    wrappers = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    groups = [group for w in wrappers for group in w.optimizer.param_groups]
    defaults = {w.optimizer.defaults.get('lr') for w in wrappers}
    scale: Mapping[str, Any] = runner.cfg.get('auto_scale_lr') or {}
    loader = runner.train_dataloader
    launcher = getattr(runner, 'strategy', runner).launcher
    return Topology(
        nodes=count_nodes(os.environ, launcher, runner.world_size),
        processes=runner.world_size,
        backend=dist.get_backend() if is_distributed() else None,
        on_cpu=get_device() == 'cpu',
        # The data loader's own is None where it was given a batch sampler.
        batch_size=loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None),
        accumulated=max(getattr(w, '_accumulative_counts', 1) for w in wrappers),
        configured=defaults.pop() if len(defaults) == 1 else None,
        # Schedulers keep the rate from which they start as the initial one.
        rates=tuple(sorted({float(g.get('initial_lr', g['lr'])) for g in groups})),
        base_batch_size=scale.get('base_batch_size'),
        scaled=bool(scale.get('enable')),
    )


@HOOKS.register_module()
class TopologyHook(Hook):
    """Logs a training's `Topology` before it begins.

    Warns where its batch is not `auto_scale_lr.base_batch_size`, for which the learning rate is
    meant.
    """

    def before_train(self, runner: Runner) -> None:
        """Logs on rank 0."""
        if runner.rank:
            return
        found = topology(runner)
        runner.logger.info(f'Topology: {found}')
        advice = found.advice()
        if advice:
            runner.logger.warning(advice)


def _count(number: int, noun: str) -> str:
    plural = 'es' if noun.endswith('s') else 's'
    return f'{number} {noun}{"" if number == 1 else plural}'
