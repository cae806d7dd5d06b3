"""Checks of options and images that all backbones share."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmvttt.arguments import check_int, check_ints, check_rate

OUT_TYPES = ('featmap', 'avg_featmap')


def map_size(x: Tensor) -> tuple[int, int]:
    """Height and width of a map `(B, C, h, w)`, as numbers even when traced."""
    height, width = x.shape[2], x.shape[3]
    # torch.jit.trace, which FLOP counters use, has tensors for sizes.
    return (int(height), int(width)) if torch.jit.is_tracing() else (height, width)


def check_image(x: Tensor, in_channels: int, model: str) -> None:
    """Raises an error unless `x` is an image `(B, in_channels, H, W)` of floating-point numbers."""
    # Not len(x), which would fix the batch of an export.
    if x.dim() == 4 and x.shape[0] == 0:
        raise ValueError(
            f'{model} got an empty batch, {tuple(x.shape)}: skip it, or keep an image at least.'
        )
    if x.dim() != 4 or x.shape[1] != in_channels or 0 in x.shape:
        raise ValueError(
            f'{model} takes images (B, {in_channels}, H, W), got {tuple(x.shape)}: convert the '
            'images, or set in_channels.'
        )
    if not x.is_floating_point():
        raise TypeError(
            f'{model} takes images of floating-point numbers, got {x.dtype}: normalise them '
            'first, as a data_preprocessor does.'
        )


def resolve_arch(
    arch: str | Mapping[str, Any], zoo: Mapping[str, Mapping[str, Any]], model: str
) -> dict[str, Any]:
    """An architecture by name, or as a dict with the keys of the zoo.

    As in mmpretrain, its depth is `num_layers` if all blocks have one width, or `depths`, a number
    for each stage.

    Raises:
        ValueError: If the name is unknown, keys are missing or too many, or a number is below 1.
        TypeError: If an entry is not an integer, or with stages not a sequence of integers.
    """
    example = next(iter(zoo.values()))
    if not isinstance(arch, Mapping):
        if arch not in list(zoo):
            raise ValueError(
                f'{model} has no arch {arch!r}: choose one of {sorted(zoo)}, or give a dict with '
                f'{sorted(example)}.'
            )
        return dict(zoo[arch])
    if set(arch) != set(example):
        raise ValueError(
            f'The arch of {model} needs exactly the keys {sorted(example)}, got '
            f'{sorted(map(str, arch))}.'
        )
    for key, value in arch.items():
        check = check_int if isinstance(example[key], int) else check_ints
        check(f'arch[{key!r}]', value)
    return dict(arch)


def drop_path_rates(rate: float, num_layers: int) -> list[float]:
    """Stochastic depth of every block: linear from 0 at the first to `rate` at the last.

    Raises:
        ValueError: If the rate is not in [0, 1).
    """
    check_rate('drop_path_rate', rate)
    return [rate * i / max(num_layers - 1, 1) for i in range(num_layers)]


def resolve_indices(indices: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`out_indices` counted from the start.

    Raises:
        ValueError: If one is out of range, there is none, or they are not in ascending order.
        TypeError: If one is no integer.
    """
    indices = [indices] if isinstance(indices, int) else indices
    check_ints('out_indices', indices, -num_layers, num_layers - 1)
    resolved = tuple(i + num_layers if i < 0 else i for i in indices)
    if not resolved or list(resolved) != sorted(set(resolved)):
        raise ValueError(
            f'out_indices={list(indices)}: give one or more from {-num_layers} to '
            f'{num_layers - 1}, each once, in ascending order.'
        )
    return resolved
