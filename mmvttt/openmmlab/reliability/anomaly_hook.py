"""Stops a training at a non-finite loss before the weights are updated, and names its images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.dist import all_gather, barrier, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmvttt.arguments import check_int
from mmvttt.checkpoints.read import WRAPPERS

from ..registry import HOOKS
from ..unwrap import bare_model

# Steps between two checks of losses on a GPU.
_GPU_INTERVAL = 10
# Keys that identify an image of a batch, the best first.
_NAMES = ('img_path', 'img_id', 'sample_idx')


class AnomalyError(RuntimeError):
    """The loss of a training step is not finite."""


@dataclass(frozen=True)
class _Step:
    """A step of this process, with losses that are still on the device."""

    text: str
    terms: dict[str, Tensor]
    images: list[str]

    @property
    def total(self) -> Any:
        return sum(self.terms.values())


@HOOKS.register_module()
class AnomalyHook(Hook):
    """Ends the training on all ranks at a step whose loss is not finite.

    Checks the result of a model's forward with `mode='loss'`, when the weights are still unchanged.
    The error names the step, the rank, the terms of the loss, the images of the batch, and
    non-finite weights.

    Reading a number from a GPU waits for all work before it, so the backward would start on an idle
    device. There the losses stay on the device, and are read every `interval` steps and before a
    checkpoint is written. The error then names the step, its terms and its images, but the weights
    have changed since. They are in no checkpoint: an exact resume with `interval=1` repeats the
    same step and reports the rest.

    A model whose losses do not come from a forward with `mode='loss'` is not checked.

    Args:
        interval: Steps between checks. None: 10 on a GPU, and 1 on a CPU, where checking is free.
    """

    def __init__(self, interval: int | None = None) -> None:
        if interval is not None:
            check_int('interval', interval, 1)
        self.interval = interval
        self._text = ''
        # Steps since the last check.
        self._steps: list[_Step] = []
        self._handle: Any = None

    def before_train(self, runner: Runner) -> None:
        """Hooks into the model."""
        model = bare_model(runner.model)
        self._handle = model.register_forward_hook(self._check, with_kwargs=True)

    def before_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Notes the step."""
        # Not the runner itself: copying the model copies its hooks and everything that they hold.
        self._text = f'step {runner.iter + 1} of {runner.max_iters}'

    def after_train(self, runner: Runner) -> None:
        """Checks a last time, and removes the hook."""
        self.require_finite()
        self._handle.remove()

    def require_finite(self, latest: _Step | None = None, model: nn.Module | None = None) -> None:
        """Raises an AnomalyError on all ranks if a loss since the last check was not finite.

        At the `latest` step, before its update, it also names weights of the `model`.
        """
        if (first := self._first_bad()) is None:
            return
        step, rank = first
        message = _describe(step, rank)
        if not torch.isfinite(step.total):
            if step.images:
                message += f' Images of this batch: {", ".join(step.images)}.'
            if step is latest and model is not None:
                message = ' '.join([message, *bad_weights(model)])
        if step is not latest:
            message += (
                ' The weights have been updated since then. To see more, resume from the last '
                "checkpoint with custom_hooks=[dict(type='mmvttt.AnomalyHook', interval=1)]."
            )
        self._handle.remove()
        # To the log file too: ranks other than 0 show only errors on the screen.
        print_log(message, 'current', logging.ERROR)
        # The first rank to exit may end the others before they have reported.
        barrier()
        raise AnomalyError(message)

    def _check(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> None:
        if not model.training or kwargs.get('mode') != 'loss':
            return
        with torch.no_grad():
            terms = loss_terms(losses)
        if not terms:
            return
        step = _Step(self._text, terms, image_names(args, kwargs))
        self._steps.append(step)
        on_cpu = next(iter(terms.values())).device.type == 'cpu'
        if len(self._steps) >= (self.interval or (1 if on_cpu else _GPU_INTERVAL)):
            self.require_finite(step, model)

    def _first_bad(self) -> tuple[_Step, int] | None:
        """The first step with a non-finite loss, and its rank, the same on all ranks."""
        steps, self._steps = self._steps, []
        if not steps:
            return None
        bad = torch.stack([~torch.isfinite(step.total) for step in steps])
        # Steps, by ranks.
        everywhere = torch.stack(all_gather(bad.int()), 1).tolist()
        return next(
            ((s, ranks.index(1)) for s, ranks in zip(steps, everywhere, strict=True) if any(ranks)),
            None,
        )


def _describe(step: _Step, rank: int) -> str:
    total = step.total
    here = f' on rank {rank} of {get_world_size()}' if get_world_size() > 1 else ''
    if torch.isfinite(total):
        return f'The loss is not finite at {step.text}{here}: see the message of that rank.'
    bad = [f'{n} = {t.item()}' for n, t in step.terms.items() if not torch.isfinite(t)]
    good = [f'{n} = {t.item():.6g}' for n, t in step.terms.items() if torch.isfinite(t)]
    terms = ', '.join(bad) or f'the sum of its terms is {total.item()}'
    others = f' (finite: {", ".join(good)})' if good else ''
    return f'The loss is not finite at {step.text}{here}: {terms}{others}.'


def loss_terms(losses: Any) -> dict[str, Tensor]:
    """The terms of the loss, by the rules of mmengine's `BaseModel.parse_losses`."""
    terms: dict[str, Tensor] = {}
    for name, value in losses.items() if isinstance(losses, Mapping) else ():
        if 'loss' not in name:
            continue
        if isinstance(value, Tensor):
            terms[name] = value.mean()
        elif isinstance(value, list | tuple):
            terms.update((f'{name}[{i}]', v.mean()) for i, v in enumerate(value))
    return terms


def image_names(args: tuple, kwargs: dict) -> list[str]:
    """Names of the images of a batch, or their numbers where it has no names."""
    names = []
    samples = [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, 'metainfo')]
    for i, sample in enumerate(samples):
        info = sample.metainfo
        ids = (str(info[key]) for key in _NAMES if info.get(key) is not None)
        names.append(next(ids, f'no. {i}'))
    return names


def bad_weights(model: nn.Module, buffers: bool = False) -> Iterator[str]:
    """Describes non-finite weights and buffers, if there are any."""
    bad = [(n, p.detach()) for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if buffers:
        # Attention masks may be infinite.
        bad += [
            (n, b) for n, b in model.named_buffers() if b.is_floating_point() and b.isnan().any()
        ]
    if bad:
        name, weight = bad[0]
        plain = WRAPPERS.sub('', name)
        yield (
            f'{len(bad)} weights{" or buffers" if buffers else ""} are not finite already, first '
            f'{plain}: {_summary(weight)}. An earlier update is the cause: resume from a '
            'checkpoint before it, with a lower learning rate, clip_grad or bf16 in place of fp16.'
        )


def _summary(tensor: Tensor) -> str:
    bad, nan = int((~torch.isfinite(tensor)).sum()), int(tensor.isnan().sum())
    kind = f'{str(tensor.dtype).removeprefix("torch.")} {tuple(tensor.shape)}'
    return f'{kind} with {bad} of {tensor.numel()} values not finite ({nan} of them NaN)'
