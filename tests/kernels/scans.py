"""Inputs of ttt_linear, its gradients and errors: shared by its tests."""

import torch

from ttt_kernels import ttt_linear
from ttt_kernels._inputs import state_dtype

NAMES = ('q', 'k', 'v', 'eta', 'w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale')
WAYS = {'f': 'forward', 'b': 'backward'}
OP = torch.ops.ttt_kernels.ttt_linear
OP_BACKWARD = torch.ops.ttt_kernels.ttt_linear_backward


def make(tokens, ways='fb', size=16, batch=2, heads=2, dim=6, dtype=torch.float64, seed=0):
    """Inputs by name, of the magnitudes of a trained model; a seed gives one set in all dtypes."""
    generator = torch.Generator().manual_seed(seed)
    scans, state = len(ways), state_dtype(dtype)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (batch, tokens, scans, heads)
    step = torch.sigmoid(normal(*shape)) / dim
    values = [
        *(normal(*shape, dim).to(dtype) for _ in range(3)),
        step.to(state),
        (0.3 * normal(scans, heads, dim, dim)).to(state),
        (0.1 * normal(scans, heads, dim)).to(state),
        (1 + 0.1 * normal(scans, heads, dim)).to(state),
        (0.1 * normal(scans, heads, dim)).to(state),
        (1 / torch.arange(1, size + 1) + 0.05 * normal(scans, size)).to(state),
    ]
    return dict(zip(NAMES, values, strict=True))


def call(inputs, ways='fb', size=16, backend='reference', **kwargs):
    directions = tuple(WAYS[w] for w in ways)
    return ttt_linear(
        **inputs, directions=directions, mini_batch_size=size, backend=backend, **kwargs
    )


def with_gradients(function, inputs, seed=1):
    """Output and gradients by name, for a random gradient of the output."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items() if x is not None}
    output = function({**inputs, **leaves})
    grad = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    grads = torch.autograd.grad(output, list(leaves.values()), grad.to(output.dtype))
    return output.detach(), dict(zip(leaves, grads, strict=True))


def error(x, y):
    """Largest difference over the largest value of `y`."""
    return ((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30)).item()


def assert_same(found, expected, tolerance):
    (output, grads), (expected_output, expected_grads) = found, expected
    assert error(output, expected_output) < tolerance
    assert grads.keys() == expected_grads.keys()
    wrong = {n: error(g, expected_grads[n]) for n, g in grads.items()}
    assert all(e < tolerance for e in wrong.values()), wrong
