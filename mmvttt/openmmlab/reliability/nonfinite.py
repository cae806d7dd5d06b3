"""Describes a step whose loss is not finite: its terms, images and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Parts that FSDP, torch.compile and activation checkpointing add to the names of modules.
_WRAPPERS = ('_fsdp_wrapped_module', '_checkpoint_wrapped_module', '_orig_mod')
# Keys that identify an image of a batch, the best first.
_NAMES = ('img_path', 'img_id', 'sample_idx')


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


def image_names(args: tuple, kwargs: dict) -> list[str]:
    """Names of the images of a batch, as far as it has them."""
    names = []
    samples = [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, 'metainfo')]
    for i, sample in enumerate(samples):
        given = (str(sample.metainfo[n]) for n in _NAMES if sample.metainfo.get(n) is not None)
        names.append(next(given, f'no. {i}'))
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
        plain = '.'.join(part for part in name.split('.') if part not in _WRAPPERS)
        yield (
            f'{len(bad)} weights{" or buffers" if buffers else ""} are not finite already, first '
            f'{plain}: {_summary(weight)}. An earlier update is the cause: resume from a '
            'checkpoint before it, with a lower learning rate, clip_grad or bf16 in place of fp16.'
        )


def _summary(tensor: Tensor) -> str:
    bad, nan = int((~torch.isfinite(tensor)).sum()), int(tensor.isnan().sum())
    kind = f'{str(tensor.dtype).removeprefix("torch.")} {tuple(tensor.shape)}'
    return f'{kind} with {bad} of {tensor.numel()} values not finite ({nan} of them NaN)'
