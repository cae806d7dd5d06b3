"""Models that run in another way: new objects, which share the weights of the given one."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .cuda_graph import Replayed


class Autocast(nn.Module):
    """Runs a backbone, images → maps, in mixed precision and returns its maps in fp32."""

    def __init__(self, network: nn.Module, dtype: str) -> None:
        super().__init__()
        self.network = network
        self.dtype = getattr(torch, dtype)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(images.device.type, self.dtype):
            maps = self.network(images)
        return tuple(y.float() for y in maps)


def prepare(
    model: nn.Module,
    part: str = '',
    dtype: str | None = None,
    cuda_graph: bool = False,
) -> nn.Module:
    """Returns a model for inference whose part runs in mixed precision, or by a CUDA graph.

    It shares all weights with `model`, which stays as it was.

    Args:
        model: In evaluation mode.
        part: Name of a child that takes images, or '' for the model itself. Neck and heads of a
            detector stay in fp32: rounding hurts boxes and suppression, which are cheap.
        dtype: 'bfloat16' or 'float16', or None to leave the precision as it is.
        cuda_graph: See `Replayed`.

    Raises:
        UsageError: The model has no such part.
    """
    if dtype is None and not cuda_graph:
        return model
    if part and part not in model._modules:
        raise UsageError(
            f'{type(model).__name__} has no {part}, which dtype and cuda_graph are for: leave them '
            'out',
            *('dtype', 'cuda_graph'),
        )
    network = model.get_submodule(part)
    if dtype is not None:
        network = Autocast(network, dtype)
    if cuda_graph:
        network = Replayed(network)
    if not part:
        return network
    prepared = copy.copy(model)
    prepared._modules = {**model._modules, part: network}
    return prepared
