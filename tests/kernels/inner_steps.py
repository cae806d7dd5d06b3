"""Inputs and calls of the full-batch inner steps of ViT³ and T⁵, for their tests."""

import importlib
import math

import torch
from kernel_testing import RecordedOps, normal

from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp
from ttt_kernels._inputs import state_dtype

# With damping, s = 1/3 would leave the step tiny: this one makes it as large as the weights.
SCALE = 5.0


def make_glu(hw, dim=6, batch=2, heads=2, dtype=torch.float64, seed=0, device='cpu'):
    """Inputs by name; a seed gives one set in all dtypes. q, k and v share one projection."""
    generator = torch.Generator().manual_seed(seed)
    packed = normal(generator, batch, math.prod(hw), 3 * heads * dim + 1)
    # Moved in one piece: views that are moved one by one arrive contiguous.
    packed = packed.to(device, dtype)[..., :-1]
    q, k, v = (x.unflatten(-1, (heads, dim)) for x in packed.chunk(3, -1))
    w1, w2 = (normal(generator, heads, dim, dim) / dim**0.5 for _ in range(2))
    w1, w2 = (w.to(device, state_dtype(dtype)) for w in (w1, w2))
    return {'q': q, 'k': k, 'v': v, 'w1': w1, 'w2': w2}


def make_dwconv(hw, dim=6, batch=2, dtype=torch.float64, seed=0, device='cpu'):
    generator = torch.Generator().manual_seed(seed)
    packed = normal(generator, batch, math.prod(hw), 3 * dim + 1)
    q, k, v = packed.to(device, dtype)[..., :-1].chunk(3, -1)
    w3 = normal(generator, dim, 3, 3) / 3
    return {'q': q, 'k': k, 'v': v, 'w3': w3.to(device, state_dtype(dtype))}


def make_swiglu(hw, dim=6, batch=2, heads=2, dtype=torch.float64, seed=0, device='cpu'):
    """`make_glu` with a third weight."""
    w3 = normal(torch.Generator().manual_seed(seed + 1), heads, dim, dim) / dim**0.5
    inputs = make_glu(hw, dim, batch, heads, dtype, seed, device)
    return {**inputs, 'w3': w3.to(device, state_dtype(dtype))}


def call_glu(inputs, hw, scale=SCALE, backend='reference', **options):
    return ttt_glu(**inputs, scale=scale, backend=backend, **options)


def call_dwconv(inputs, hw, scale=SCALE, backend='reference', **options):
    return ttt_dwconv(**inputs, hw=hw, scale=scale, backend=backend, **options)


def call_mlp(inputs, hw, scale=1.0, backend='reference', **options):
    return ttt_mlp(**inputs, scale=scale, backend=backend, **options)


def primal(name, inputs, *size, scale=None, **options):
    """The definition of the op `name`."""
    reference = importlib.import_module(f'ttt_kernels.{name}.reference')
    tensors = list(inputs.values())
    if name == 'ttt_mlp':
        tensors += [None] * ('w3' not in inputs)
        return reference.primal(*tensors, 1.0 if scale is None else scale, **options)
    return reference.primal(*tensors, *size, SCALE if scale is None else scale, **options)


def inner_gradient(op, inputs, hw, backend):
    """G, which the registered op keeps for its backward pass."""
    with RecordedOps() as calls:
        op.call(inputs, hw, scale=1 / 3, backend=backend)
    return calls[0][2][1]
