"""Stops a training whose loss is not finite before it spoils the weights, and says where it began.

The first value that is not finite has a place: an image, a weight, a module, a loss. The step that
meets it is still there to be looked at: same weights, same images, same random numbers. So its
forward is run once more, with a look at every module.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.dist import all_reduce, barrier, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor, nn

from ..arguments import check_int
from ..registry import HOOKS

# What FSDP and torch's activation checkpointing put into the names of modules and parameters.
_WRAPPERS = ('_fsdp_wrapped_module', '_checkpoint_wrapped_module', '_orig_mod')
# What tells the images of a batch apart, the best first.
_NAMES = ('img_path', 'img_id', 'sample_idx')
_SHOWN = 4
# Steps between two looks at a flag on a GPU; what the flag says as long as all is well.
_GPU_INTERVAL = 10
_NONE = 2**62


class AnomalyError(RuntimeError):
    """The loss of a training step is not finite."""


class _Noted(NamedTuple):
    """What is known of a step without looking at the device."""

    count: int
    step: str
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
    same step again, and says the rest.

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
        self._noted: deque[_Noted] = deque(maxlen=1)
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
        # Not the runner itself: who copies the model copies its hooks and all that they hold.
        total = f'[{runner.iter + 1}/{runner.max_iters}]'
        if runner.log_processor.by_epoch:
            size = len(runner.train_dataloader)
            self._step = f'Epoch(train) [{runner.epoch + 1}][{batch_idx + 1}/{size}], step {total}'
        else:
            self._step = f'Iter(train) {total}'

    def after_train(self, runner: Runner) -> None:
        """Looks a last time, and stops watching."""
        self.look()
        self._release()

    def look(self) -> None:
        """Reads the flag, on all ranks.

        Raises:
            AnomalyError: The loss of a step since the last look was not finite.
        """
        found = self._first_anomaly()
        if found is None:
            return
        self._release()
        count, rank = found
        noted = next((n for n in self._noted if n.count == count), None)
        message = f'The loss of rank {rank} was not finite at step {count} of this process.'
        if noted is not None:
            message = self._what(noted.step, noted.terms, sum(noted.terms.values()), rank)
            if rank == get_rank():
                message += f' Images of this batch: {", ".join(noted.images)}.'
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
        self._random = _random_state()

    def _check(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> dict | None:
        if not model.training or kwargs.get('mode') != 'loss':
            return None
        with torch.no_grad():
            terms = _terms(losses)
            if not terms:
                return None
            total = sum(terms.values())
            interval = self.interval or (1 if total.device.type == 'cpu' else _GPU_INTERVAL)
            self._note(terms, total, args, kwargs, interval)
        if self._count % interval:
            return None
        found = self._first_anomaly()
        if found is None:
            self._in_a_row = 0
            return None
        count, where = found
        if count < self._count:
            self.look()
        self._first = None
        self._in_a_row += 1
        what = self._what(self._step, terms, total, where)
        if self._in_a_row <= self.tolerated:
            print_log(
                f'{what} The update is left out ({self._in_a_row} of {self.tolerated} in a row).',
                'current',
                logging.WARNING,
            )
            for buffer, before in self._buffers:
                # Without autograd, which keeps them for a backward that does not use them.
                buffer.data.copy_(before)
            return {n: _nan_like(v) if 'loss' in n else v for n, v in losses.items()}
        self._release()
        # On all ranks: a forward may communicate.
        module = self._bad_module(model, args, kwargs)
        message = what
        if not torch.isfinite(total):
            names = _image_names(args, kwargs)
            inputs = list(_bad_inputs(args, kwargs, names))
            images = f'Images of this batch: {", ".join(names)}.'
            message = ' '.join([what, images, *bad_weights(model), *(inputs or [module])])
            # To the log file too; of another rank than 0 the screen sees errors only.
            print_log(message, 'current', logging.ERROR)
        # The first rank that ends may end the others, before they have said what they know.
        barrier()
        raise AnomalyError(message)

    def _note(
        self, terms: dict[str, Tensor], total: Tensor, args: tuple, kwargs: dict, interval: int
    ) -> None:
        """Keeps, on the device, the first step whose loss is not finite; waits for nothing."""
        self._count += 1
        if self._noted.maxlen != interval:
            self._noted = deque(self._noted, maxlen=interval)
        if interval > 1:
            images = _image_names(args, kwargs)
            self._noted.append(_Noted(self._count, self._step, terms, images))
        here = self._count * get_world_size() + get_rank()
        first = torch.where(torch.isfinite(total), _NONE, here)
        self._first = first if self._first is None else torch.minimum(self._first, first)

    def _first_anomaly(self) -> tuple[int, int] | None:
        """The first step, and its rank, whose loss was not finite: the same on all ranks."""
        if self._first is None:
            return None
        if get_world_size() > 1:
            all_reduce(self._first, 'min')
        first = int(self._first)
        return divmod(first, get_world_size()) if first < _NONE else None

    def _what(self, step: str, terms: dict[str, Tensor], total: Tensor, where: int) -> str:
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

    def _bad_module(self, model: nn.Module, args: tuple, kwargs: dict) -> str:
        """Runs the forward once more and says which module was the first to go non-finite."""
        trace = _Trace(model)
        buffers = [(b, b.clone()) for b in model.buffers()]
        _set_random_state(self._random)
        try:
            with torch.no_grad(), torch.compiler.set_stance('force_eager'), trace:
                again = sum(_terms(model(*args, **kwargs)).values())
            otherwise = _no_module(bool(torch.isfinite(again)), type(model).__name__, trace.last)
        except Exception as error:
            otherwise = f'The forward could not be run once more: {type(error).__name__}: {error}.'
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return trace.found or otherwise


class _Trace(ExitStack):
    """Watches the modules of a model inside a `with`, for the first value that is not finite.

    Attributes:
        found: What it was, in a sentence.
        last: The last module before that gave values.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: str | None = None
        self.last: str | None = None
        self._model = model

    def __enter__(self) -> _Trace:
        for name, module in self._model.named_modules():
            if module is not self._model:
                called = f'{_plain(name)} ({type(module).__name__})'
                enter, leave = partial(self._enter, called), partial(self._leave, called)
                self.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                self.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        return super().__enter__()

    def _enter(self, called: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        # The masks of an attention may well be infinite.
        rest = {k: v for k, v in kwargs.items() if not k.endswith(('mask', 'masks'))}
        bad = None if self.found else _first_bad(args, rest)
        if bad is not None:
            before = (
                f'every module before it, the last one {self.last}, gave finite ones, so the code '
                'between them does it'
                if self.last
                else 'the code before it does it'
            )
            self.found = (
                f'The first values that are not finite enter {called}: {_summary(bad)}; {before}.'
            )

    def _leave(self, called: str, _: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.found:
            return
        bad = _first_bad(output)
        if bad is None:
            self.last = called
            return
        inputs = [_summary(t) for t in _tensors((args, kwargs))]
        shown = '; '.join([*inputs[:_SHOWN], *(['…'] if len(inputs) > _SHOWN else [])])
        self.found = (
            f'The first module that goes non-finite is {called}: its output is {_summary(bad)}; '
            f'its inputs are finite{f": {shown}" if shown else ""}.'
        )


def _no_module(finite: bool, model: str, last: str | None) -> str:
    if finite:
        return (
            'The same forward, run once more, gave a finite loss: an operation that is not '
            'deterministic, or a fault of the device.'
        )
    return (
        'All modules give finite values: the loss itself goes wrong, in the code that computes it '
        f'in {model}{f" after {last}, the last module" if last else ""}.'
    )


def _terms(losses: Any) -> dict[str, Tensor]:
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


def _nan_like(value: Any) -> Any:
    return value * torch.nan if isinstance(value, Tensor) else [v * torch.nan for v in value]


def _require_scaler(wrapper: OptimWrapper | OptimWrapperDict, tolerated: int) -> None:
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    for single in wrappers:
        scaler = getattr(single, 'loss_scaler', None)
        if scaler is None or not scaler.is_enabled():
            raise ValueError(
                f'AnomalyHook(tolerated={tolerated}) needs a loss scaler, which leaves out the '
                f'update of a step that is not finite; {type(single).__name__} has none: set '
                "tolerated=0, or optim_wrapper.type='AmpOptimWrapper'"
            )


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _plain(name: str) -> str:
    return '.'.join(part for part in name.split('.') if part not in _WRAPPERS)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Floating-point tensors in nested containers."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)


def _first_bad(*trees: Any) -> Tensor | None:
    return next((t for t in _tensors(trees) if not torch.isfinite(t).all()), None)


def _summary(tensor: Tensor) -> str:
    """Shape, type, range of the finite values and number of the others."""
    kind = f'{str(tensor.dtype).removeprefix("torch.")} {tuple(tensor.shape)}'
    finite = torch.isfinite(tensor)
    values = tensor[finite]
    bad = tensor.numel() - values.numel()
    span = f' in [{values.min().item():.4g}, {values.max().item():.4g}]' if values.numel() else ''
    if not bad:
        return f'{kind}{span}'
    nan = int(tensor.isnan().sum())
    rest = f', the others{span}' if values.numel() else ''
    return f'{kind} with {bad} of {tensor.numel()} values not finite ({nan} of them NaN){rest}'


def _samples(tree: Any) -> Iterator[Any]:
    if hasattr(tree, 'metainfo'):
        yield tree
    elif isinstance(tree, Mapping):
        yield from chain.from_iterable(map(_samples, tree.values()))
    elif isinstance(tree, list | tuple):
        yield from chain.from_iterable(map(_samples, tree))


def _image_names(args: tuple, kwargs: dict) -> list[str]:
    """What the batch calls its images, else their numbers in the batch."""
    samples = list(_samples((args, kwargs)))
    if not samples:
        sizes = (len(v) for v in (*args, *kwargs.values()) if _is_batch(v))
        return [f'no. {i}' for i in range(next(sizes, 0))]
    names = []
    for i, sample in enumerate(samples):
        found = (str(sample.metainfo[n]) for n in _NAMES if sample.metainfo.get(n) is not None)
        names.append(next(found, f'no. {i}'))
    return names


def _is_batch(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)


def bad_weights(model: nn.Module, buffers: bool = False) -> Iterator[str]:
    """A sentence about the weights (and buffers) that are not finite, if there are any."""
    bad = [(n, p) for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if buffers:
        # Masks may be infinite.
        bad += [
            (n, b) for n, b in model.named_buffers() if b.is_floating_point() and b.isnan().any()
        ]
    if bad:
        name, weight = bad[0]
        what = 'weights or buffers' if buffers else 'weights'
        yield (
            f'{len(bad)} {what} are not finite already, the first of them {_plain(name)}: '
            f'{_summary(weight)}. An update before this step did it: resume from a checkpoint '
            'before that, with a lower learning rate, clip_grad or bf16 in place of fp16.'
        )


def _bad_inputs(args: tuple, kwargs: dict, names: list[str]) -> Iterator[str]:
    for key, value in chain(enumerate(args), kwargs.items()):
        bad = _first_bad(value)
        if bad is None:
            continue
        which = ''
        if _is_batch(value) and len(value) == len(names):
            images = [n for n, v in zip(names, value, strict=True) if _first_bad(v) is not None]
            which = f', in {", ".join(images)}'
        yield f'The input {key!r} itself is not finite{which}: {_summary(bad)}.'
