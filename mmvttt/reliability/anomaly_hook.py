"""Stops a training whose loss is not finite before it spoils the weights, and names the origin.

At the step that meets it image, weights and random numbers are still there: its forward is run once
more, with every module watched (`nonfinite.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.dist import all_gather, barrier, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor, nn

from ..arguments import check_int
from ..registry import HOOKS
from .nonfinite import (
    bad_inputs,
    bad_weights,
    first_bad_module,
    image_names,
    loss_terms,
    nan_like,
    random_state,
    total_loss,
)

# Steps between two looks at a number on a GPU, and that number as long as all is well.
_GPU_INTERVAL = 10
_NO_STEP = 2**62


class AnomalyError(RuntimeError):
    """The loss of a training step is not finite."""


@dataclass(frozen=True)
class _Step:
    """A step of this process, with numbers that are still on the device."""

    number: int
    text: str
    terms: dict[str, Tensor]
    images: list[str]


@HOOKS.register_module()
class AnomalyHook(Hook):
    """Ends the training, on all ranks, at a step whose loss is not finite.

    Looks at what a model's forward returns with `mode='loss'`, so the weights are those before the
    step, and the error names the step, the rank, the terms of the loss, the images of the batch,
    and what was the first to go wrong: a weight, an image, a module or the loss itself.

    To look at a number on a GPU waits for all that leads to it, and the backward would be launched
    onto an idle device. There a flag stays on the device, and is read every `interval` steps and
    before a checkpoint is written. The error then names the step, its terms and its images, but the
    weights are later ones, and are in no checkpoint: an exact resume with `interval=1` meets the
    same step again, and reports the rest.

    A model that does not compute its losses by a forward with `mode='loss'` is not watched.

    Args:
        tolerated: So many steps in a row are let pass with a warning. Their update is left out by
            the loss scaler, which they need: their loss is made NaN, so that it has to; buffers,
            such as the statistics of a BatchNorm, get back what they were. With accumulated
            gradients the update is the whole one that the step is a part of.
        interval: Steps from one look to the next. None: 10 on a GPU; 1 on a CPU, where looking is
            free, and with `tolerated`, whose loss scaler waits for the device in any case.
    """

    def __init__(self, tolerated: int = 0, interval: int | None = None) -> None:
        check_int('tolerated', tolerated, 0)
        if interval is not None:
            check_int('interval', interval, 1)
        if tolerated and interval not in (None, 1):
            raise ValueError(f'tolerated={tolerated} needs interval=1, got {interval}')
        self.tolerated = tolerated
        self.interval = 1 if tolerated else interval
        self._in_a_row = 0
        self._step = ''
        self._count = 0
        self._first: Tensor | None = None
        self._recent: list[_Step] = []
        self._random: tuple[Any, ...] = ()
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._handles: list[Any] = []

    def before_train(self, runner: Runner) -> None:
        """Begins to watch the model.

        Raises:
            ValueError: `tolerated` without a loss scaler.
        """
        if self.tolerated:
            _require_scaler(runner.optim_wrapper, self.tolerated)
        model = runner.model
        while is_model_wrapper(model):
            model = model.module
        self._handles = [
            model.register_forward_pre_hook(self._remember, with_kwargs=True),
            model.register_forward_hook(self._check, with_kwargs=True),
        ]

    def before_train_iter(self, runner: Runner, batch_idx: int, *_: Any, **__: Any) -> None:
        """Notes the step as the log writes it."""
        # Not the runner itself: a copy of the model copies its hooks and all that they hold.
        total = f'[{runner.iter + 1}/{runner.max_iters}]'
        if runner.log_processor.by_epoch:
            size = len(runner.train_dataloader)
            self._step = f'Epoch(train) [{runner.epoch + 1}][{batch_idx + 1}/{size}], step {total}'
        else:
            self._step = f'Iter(train) {total}'

    def after_train(self, runner: Runner) -> None:
        """Looks a last time, and stops watching."""
        self.require_finite()
        self._release()

    def require_finite(self) -> None:
        """Reads the flag, on all ranks.

        Raises:
            AnomalyError: The loss of a step since the last look was not finite.
        """
        found = self._first_anomaly()
        if found is None:
            return
        self._release()
        count, rank = found
        step = next((s for s in self._recent if s.number == count), None)
        message = f'The loss of rank {rank} was not finite at step {count} of this process.'
        if step is not None:
            message = _describe(step.text, step.terms, total_loss(step.terms), rank)
            if rank == get_rank():
                message += f' Images of this batch: {", ".join(step.images)}.'
        message += (
            ' The weights have been updated since then. To see which module was the first, resume '
            "from the last checkpoint with custom_hooks=[dict(type='mmvttt.AnomalyHook', "
            'interval=1)].'
        )
        print_log(message, 'current', logging.ERROR)
        barrier()
        raise AnomalyError(message)

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _remember(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if not model.training or kwargs.get('mode') != 'loss':
            return
        if self.tolerated:
            self._buffers = [(b, b.clone()) for b in model.buffers()]
        self._random = random_state()

    def _check(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> dict | None:
        if not model.training or kwargs.get('mode') != 'loss':
            return None
        with torch.no_grad():
            terms = loss_terms(losses)
            if not terms:
                return None
            total = total_loss(terms)
            interval = self.interval or (1 if total.device.type == 'cpu' else _GPU_INTERVAL)
            # The first step whose loss is not finite stays on the device: nothing is waited for.
            self._count += 1
            first = torch.where(torch.isfinite(total), _NO_STEP, self._count)
            self._first = first if self._first is None else torch.minimum(self._first, first)
        if interval > 1:
            here = _Step(self._count, self._step, terms, image_names(args, kwargs))
            self._recent.append(here)
            del self._recent[:-interval]
        if self._count % interval:
            return None
        found = self._first_anomaly()
        if found is None:
            self._in_a_row = 0
            return None
        count, where = found
        if count < self._count:
            self.require_finite()
        self._first = None
        self._in_a_row += 1
        message = _describe(self._step, terms, total, where)
        if self._in_a_row <= self.tolerated:
            print_log(
                f'{message} The update is left out ({self._in_a_row} of {self.tolerated} in a '
                'row).',
                'current',
                logging.WARNING,
            )
            for buffer, before in self._buffers:
                # Without autograd, which keeps them for a backward that does not use them.
                buffer.data.copy_(before)
            return {n: nan_like(v) if 'loss' in n else v for n, v in losses.items()}
        self._release()
        # On all ranks: a forward may communicate.
        module = first_bad_module(model, args, kwargs, self._random)
        if not torch.isfinite(total):
            names = image_names(args, kwargs)
            inputs = list(bad_inputs(args, kwargs, names))
            images = f'Images of this batch: {", ".join(names)}.'
            message = ' '.join([message, images, *bad_weights(model), *(inputs or [module])])
            # To the log file too; of another rank than 0 the screen sees errors only.
            print_log(message, 'current', logging.ERROR)
        # The first rank that ends may end the others, before they have reported.
        barrier()
        raise AnomalyError(message)

    def _first_anomaly(self) -> tuple[int, int] | None:
        """The first step, and its rank, whose loss was not finite: the same on all ranks."""
        if self._first is None:
            return None
        steps = torch.stack(all_gather(self._first)).tolist()
        first = min(steps)
        return (first, steps.index(first)) if first < _NO_STEP else None


def _describe(step: str, terms: dict[str, Tensor], total: Tensor, where: int) -> str:
    if torch.isfinite(total):
        return (
            f'The loss of rank {where} is not finite at {step}: see the message of that '
            f'rank. Here, on rank {get_rank()}, it is {total.item():.6g}.'
        )
    here = f' on rank {get_rank()} of {get_world_size()}' if get_world_size() > 1 else ''
    bad = [f'{n} = {t.item()}' for n, t in terms.items() if not torch.isfinite(t)]
    good = [f'{n} = {t.item():.6g}' for n, t in terms.items() if torch.isfinite(t)]
    found = ', '.join(bad) or f'the sum of its terms is {total.item()}'
    others = f' (finite: {", ".join(good)})' if good else ''
    return f'The loss is not finite at {step}{here}: {found}{others}.'


def _require_scaler(wrapper: OptimWrapper | OptimWrapperDict, tolerated: int) -> None:
    for single in wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]:
        scaler = getattr(single, 'loss_scaler', None)
        if scaler is None or not scaler.is_enabled():
            raise ValueError(
                f'AnomalyHook(tolerated={tolerated}) needs a loss scaler, which leaves out the '
                f'update of a step that is not finite; {type(single).__name__} has none: set '
                "tolerated=0, or optim_wrapper.type='AmpOptimWrapper'"
            )
