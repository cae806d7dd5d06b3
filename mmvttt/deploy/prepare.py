"""Models that run in another way: new objects, which share the weights of the given one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .cuda_graph import Replayed

# Precisions by their names.
_DTYPES = {'bfloat16': torch.bfloat16, 'float16': torch.float16}


def half_type() -> str:
    """'bfloat16' if the device computes in it, else 'float16'."""
    gpu = torch.cuda.is_available()
    bf16 = not gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    return 'bfloat16' if bf16 else 'float16'


class Autocast(nn.Module):
    """Runs a network of images in mixed precision, and returns its outputs in fp32."""

    def __init__(self, network: nn.Module, dtype: str) -> None:
        super().__init__()
        self.network = network
        self.dtype = _DTYPES[dtype]

    def forward(self, images: Tensor) -> Any:
        with torch.autocast(images.device.type, self.dtype):
            outputs = self.network(images)
        return tree_map(_in_fp32, outputs)


def _in_fp32(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def prepare(
    model: nn.Module,
    part: str = '',
    dtype: str | None = None,
    cuda_graph: bool = False,
) -> nn.Module:
    """Returns a model for inference whose part runs in mixed precision, or by a CUDA graph.

    It shares all parameters and buffers with `model`, which stays as it was; its modules, with
    their hooks and modes, are others.

    Args:
        model: In evaluation mode.
        part: Name of a child that takes images, or '' for the model itself. Neck and heads of a
            detector stay in fp32: rounding hurts boxes and suppression, which are cheap.
        dtype: 'bfloat16' or 'float16', or None to leave the precision as it is.
        cuda_graph: See `Replayed`.

    Raises:
        UsageError: The model has no such part, or there is no such dtype.
    """
    if dtype not in (None, *_DTYPES):
        raise UsageError(f'dtype={dtype!r}: give one of {", ".join(_DTYPES)}, or None', 'dtype')
    if dtype is None and not cuda_graph:
        return model
    if part and model._modules.get(part) is None:
        raise UsageError(
            f'{type(model).__name__} has no {part}, which dtype and cuda_graph are for: leave them '
            'out',
            *('dtype', 'cuda_graph'),
        )
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    prepared = copy.deepcopy(model, tensors)
    network = prepared.get_submodule(part)
    if dtype is not None:
        network = Autocast(network, dtype)
    if cuda_graph:
        network = Replayed(network)
    if not part:
        return network
    setattr(prepared, part, network)
    return prepared
