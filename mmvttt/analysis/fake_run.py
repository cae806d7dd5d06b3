"""Runs networks on fake tensors, which have shapes but no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from ..errors import UsageError


def fake_copy(network: nn.Module, image: tuple[int, ...]) -> Tensor:
    """Replaces parameters and buffers by fake tensors, in place; shared ones stay shared.

    The mode itself is not entered: a tensor that the network makes of numbers alone, such as a grid
    of positions, stays real, so that the control flow may depend on it.

    Args:
        network: May be on the meta device. It loses its weights.
        image: Shape of the input.

    Returns:
        A fake input of this shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[Tensor, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in fakes:
                    empty = fake(tensor)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, tensor.requires_grad)
                    fakes[tensor] = empty
                tensors[name] = None if tensor is None else fakes[tensor]
    return fake(torch.empty(image, device='meta'))


@contextmanager
def values_are_errors(network: nn.Module) -> Iterator[None]:
    """Context in which a fake network runs."""
    try:
        yield
    except (NotImplementedError, DataDependentOutputException, DynamicOutputShapeException) as e:
        raise UsageError(
            f'{type(network).__name__} cannot be counted as a whole ({e}): count its backbone '
            '(--backbone)'
        ) from e
