"""Inputs and calls of causal_conv for its tests."""

import torch
from kernel_testing import normal
from torch import Tensor

from ttt_kernels import causal_conv
from ttt_kernels._inputs import state_dtype
from ttt_kernels.causal_conv import reference

NAMES = {'f': 'forward', 'b': 'backward'}


def make(
    tokens, ways='fb', *, weights=2, channels=6, taps=4, batch=2, dtype=torch.float64, device='cpu'
):
    """Inputs by name; x is a part of a projection."""
    generator = torch.Generator().manual_seed(0)
    packed = normal(generator, batch, tokens, len(ways), 2 * channels + 1).to(device, dtype)
    shape = (len(ways), channels, taps)
    kernels = [normal(generator, *shape).to(device, state_dtype(dtype)) for _ in range(weights)]
    return {'x': packed[..., :channels], **dict(zip(('weight', 'other'), kernels, strict=False))}


def call(inputs, ways='fb', backend='reference', **options) -> Tensor:
    """The outputs side by side."""
    x, *weights = inputs.values()
    directions = tuple(NAMES[way] for way in ways)
    options = {'directions': directions, 'backend': backend, **options}
    return torch.cat(causal_conv(x, *weights, **options), -1)


def primal(inputs, ways='fb') -> Tensor:
    x, *weights = inputs.values()
    return torch.cat([reference.primal(x, w, ways) for w in weights], -1)
