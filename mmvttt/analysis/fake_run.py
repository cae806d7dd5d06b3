"""Runs networks on fake tensors, which have shapes but no values."""

from __future__ import annotations

import copy
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


def copy_sharing(network: nn.Module, tensors: dict[Tensor, Tensor] | None = None) -> nn.Module:
    """Copies a network, but not its parameters and buffers, which the copy shares.

    Args:
        network: Any module.
        tensors: What the copy has in the place of some parameters and buffers.
    """
    shared = [*network.parameters(), *network.buffers()]
    return copy.deepcopy(network, {id(x): (tensors or {}).get(x, x) for x in shared})


def fake_copy(network: nn.Module, image: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    """Copies a network with fake parameters and buffers. Shared ones stay shared.

    The mode itself is not entered: a tensor that the network makes of numbers alone, such as a grid
    of positions, stays real, so that the control flow may depend on it.

    Args:
        network: May be on the meta device.
        image: Shape of the input.

    Returns:
        The copy, and a fake input of this shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty

    fakes = {x: fake(x) for x in (*network.parameters(), *network.buffers())}
    return copy_sharing(network, fakes), fake(torch.empty(image, device='meta'))


@contextmanager
def values_are_errors(network: nn.Module) -> Iterator[None]:
    """Context in which a fake network runs."""
    try:
        yield
    except (NotImplementedError, DataDependentOutputException, DynamicOutputShapeException) as e:
        raise UsageError(
            f'{type(network).__name__} cannot be counted as a whole ({e}): count its backbone',
            'backbone',
        ) from e
