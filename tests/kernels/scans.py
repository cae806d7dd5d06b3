"""Inputs and calls of ttt_linear for its tests."""

import torch
from kernel_testing import normal

from ttt_kernels import ttt_linear
from ttt_kernels._inputs import state_dtype
from ttt_kernels.ttt_linear.definition import Inputs, primal

NAMES = ('q', 'k', 'v', 'eta', 'w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale')
WAYS = {'f': 'forward', 'b': 'backward'}
OP = torch.ops.ttt_kernels.ttt_linear
OP_BACKWARD = torch.ops.ttt_kernels.ttt_linear_backward


def make(tokens, ways='fb', size=16, batch=2, heads=2, dim=6, dtype=torch.float64, seed=0):
    """Inputs by name, of the magnitudes of a trained model; a seed gives one set in all dtypes."""
    generator = torch.Generator().manual_seed(seed)
    scans, state = len(ways), state_dtype(dtype)
    shape = (batch, tokens, scans, heads)
    step = torch.sigmoid(normal(generator, *shape)) / dim
    values = [
        *(normal(generator, *shape, dim).to(dtype) for _ in range(3)),
        step.to(state),
        (0.3 * normal(generator, scans, heads, dim, dim)).to(state),
        (0.1 * normal(generator, scans, heads, dim)).to(state),
        (1 + 0.1 * normal(generator, scans, heads, dim)).to(state),
        (0.1 * normal(generator, scans, heads, dim)).to(state),
        (1 / torch.arange(1, size + 1) + 0.05 * normal(generator, scans, size)).to(state),
    ]
    return dict(zip(NAMES, values, strict=True))


def call(inputs, ways='fb', size=16, **options):
    """With the reference unless a backend is named; options override `ways` and `size`."""
    ours = {'directions': tuple(WAYS[w] for w in ways), 'mini_batch_size': size}
    return ttt_linear(**inputs, **{'backend': 'reference', **ours, **options})


def definition(inputs, ways='fb', size=16, eps=1e-6):
    return primal(Inputs(**inputs), ways, size, eps)
