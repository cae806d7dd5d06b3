"""Finds the first non-finite value: in inputs, weights, modules, or the loss itself."""

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
from torch.utils._pytree import tree_leaves

# Parts that FSDP, torch.compile and activation checkpointing add to the names of modules.
_WRAPPERS = ('_fsdp_wrapped_module', '_checkpoint_wrapped_module', '_orig_mod')
# Keys that identify an image of a batch, the best first.
_NAMES = ('img_path', 'img_id', 'sample_idx')
_SHOWN = 4


def first_bad_module(
    model: nn.Module, args: tuple, kwargs: dict, random_numbers: tuple[Any, ...]
) -> str:
    """Repeats a forward of the losses, and describes the first module with a non-finite output.

    `random_numbers` is the `random_state` before it. The model's buffers are restored afterwards.
    """
    last = description = ''

    def look(called: str, _: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        nonlocal last, description
        bad = _first_bad(output)
        if bad is None and not description:
            last = called
        elif bad is not None and not description:
            inputs = [_summary(t) for t in _tensors((args, kwargs))]
            description = (
                f'The first module that goes non-finite is {called}: its output is '
                f'{_summary(bad)}; its inputs are {"; ".join(inputs[:_SHOWN]) or "no tensors"}; '
                f'the last module before it is {last or "none"}.'
            )

    buffers = [(b, b.clone()) for b in model.buffers()]
    python, numpy, cpu, cuda = random_numbers
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if module is not model:
                hook = partial(look, f'{_plain(name)} ({type(module).__name__})')
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        try:
            with torch.compiler.set_stance('force_eager'):
                again = total_loss(loss_terms(model(*args, **kwargs)))
        except Exception as error:
            return f'The forward could not be repeated: {type(error).__name__}: {error}.'
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    if not description and torch.isfinite(again):
        return (
            'The same forward, repeated, gave a finite loss: an operation is not deterministic, or '
            'the device is faulty.'
        )
    return description or (
        'All modules return finite values: the error is in the loss itself, in the code that '
        f'computes it in {type(model).__name__} after {last}, the last module.'
    )


def total_loss(terms: Mapping[str, Tensor]) -> Tensor:
    """Sum of the terms of a loss."""
    return reduce(torch.add, terms.values())


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


def random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _plain(name: str) -> str:
    return '.'.join(part for part in name.split('.') if part not in _WRAPPERS)


def _tensors(tree: Any) -> list[Tensor]:
    """Floating-point tensors in nested containers."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _first_bad(*trees: Any) -> Tensor | None:
    return next((t for t in _tensors(trees) if not torch.isfinite(t).all()), None)


def _summary(tensor: Tensor) -> str:
    """Shape, dtype, range of the finite values, and number of the others."""
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


def image_names(args: tuple, kwargs: dict) -> list[str]:
    """Names of the images of a batch, or else their indices."""
    names = []
    samples = [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, 'metainfo')]
    for i, sample in enumerate(samples):
        given = (str(sample.metainfo[n]) for n in _NAMES if sample.metainfo.get(n) is not None)
        names.append(next(given, f'no. {i}'))
    if names:
        return names
    sizes = (len(v) for v in (*args, *kwargs.values()) if _is_batch(v))
    return [f'no. {i}' for i in range(next(sizes, 0))]


def _is_batch(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)


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
        yield (
            f'{len(bad)} weights{" or buffers" if buffers else ""} are not finite already, first '
            f'{_plain(name)}: {_summary(weight)}. An earlier update is the cause: resume from a '
            'checkpoint before it, with a lower learning rate, clip_grad or bf16 in place of fp16.'
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
