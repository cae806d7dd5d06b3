"""Searches for the first value that is not finite: in inputs, weights, modules, the loss itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial, reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Parts that FSDP, torch.compile and activation checkpointing add to the names of modules.
_WRAPPERS = ('_fsdp_wrapped_module', '_checkpoint_wrapped_module', '_orig_mod')
# Keys by which images of a batch are told apart, the best first.
_NAMES = ('img_path', 'img_id', 'sample_idx')
_SHOWN = 4


def first_bad_module(
    model: nn.Module, args: tuple, kwargs: dict, random_numbers: tuple[Any, ...]
) -> str:
    """Runs a forward of the losses once more, and describes the first module that goes non-finite.

    Args:
        model: In training mode; its buffers are put back afterwards.
        args: Arguments of the forward.
        kwargs: Its keyword arguments.
        random_numbers: See `random_state`, from before the forward.
    """
    trace = _Trace(model)
    buffers = [(b, b.clone()) for b in model.buffers()]
    python, numpy, cpu, cuda = random_numbers
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    try:
        with torch.no_grad(), torch.compiler.set_stance('force_eager'), trace:
            again = total_loss(loss_terms(model(*args, **kwargs)))
        after = f' after {trace.last}, the last module' if trace.last else ''
        otherwise = (
            'The same forward, run once more, gave a finite loss: an operation that is not '
            'deterministic, or a fault of the device.'
            if torch.isfinite(again)
            else 'All modules give finite values: the loss itself goes wrong, in the code that '
            f'computes it in {type(model).__name__}{after}.'
        )
    except Exception as error:
        otherwise = f'The forward could not be run once more: {type(error).__name__}: {error}.'
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return trace.found or otherwise


def total_loss(terms: Mapping[str, Tensor]) -> Tensor:
    """Sum of the terms of a loss."""
    return reduce(torch.add, terms.values())


class _Trace(ExitStack):
    """Watches the modules of a model inside a `with`, for the first value that is not finite.

    Attributes:
        found: Description of that value.
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
                look = partial(self._look, f'{_plain(name)} ({type(module).__name__})')
                self.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        return super().__enter__()

    def _look(self, called: str, _: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.found:
            return
        bad = _first_bad(output)
        if bad is None:
            self.last = called
            return
        # The masks of an attention may well be infinite.
        kwargs = {k: v for k, v in kwargs.items() if not k.endswith(('mask', 'masks'))}
        entered = _first_bad(args, kwargs)
        if entered is not None:
            before = 'the code before it'
            if self.last:
                before = (
                    f'every module before it, the last one {self.last}, gave finite ones, so the '
                    'code between them'
                )
            self.found = (
                f'The first values that are not finite enter {called}: {_summary(entered)}; '
                f'{before} does it.'
            )
            return
        inputs = [_summary(t) for t in _tensors((args, kwargs))]
        shown = '; '.join([*inputs[:_SHOWN], *(['…'] if len(inputs) > _SHOWN else [])])
        self.found = (
            f'The first module that goes non-finite is {called}: its output is {_summary(bad)}; '
            f'its inputs are finite{f": {shown}" if shown else ""}.'
        )


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


def nan_like(value: Any) -> Any:
    return value * torch.nan if isinstance(value, Tensor) else [v * torch.nan for v in value]


def random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


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


def image_names(args: tuple, kwargs: dict) -> list[str]:
    """Names of the images of a batch, else their numbers in it."""
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
    """Describes the weights (and buffers) that are not finite, if there are any."""
    bad: list[tuple[str, Tensor]]
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


def bad_inputs(args: tuple, kwargs: dict, names: list[str]) -> Iterator[str]:
    for key, value in chain(enumerate(args), kwargs.items()):
        bad = _first_bad(value)
        if bad is None:
            continue
        which = ''
        if _is_batch(value) and len(value) == len(names):
            images = [n for n, v in zip(names, value, strict=True) if _first_bad(v) is not None]
            which = f', in {", ".join(images)}'
        yield f'The input {key!r} itself is not finite{which}: {_summary(bad)}.'
