"""Inputs, calls and comparisons for the tests of ViT³'s inner steps, ttt_glu and ttt_dwconv."""

import dataclasses
import math
from collections.abc import Callable

import torch

from ttt_kernels import ttt_dwconv, ttt_glu
from ttt_kernels._inputs import state_dtype
from ttt_kernels.ttt_dwconv import reference as dwconv_reference
from ttt_kernels.ttt_glu import reference as glu_reference

# fp64 has 16 digits; sums over some thousand tokens of terms that cancel cost three or four.
FP64 = 1e-12
# With damping, s = 1/3 would leave the step tiny: this one makes it as large as the weights.
SCALE = 5.0


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_glu(hw, dim=6, batch=2, heads=2, dtype=torch.float64, seed=0):
    """Inputs by name; a seed gives one set in all dtypes. q, k and v share one projection."""
    generator = torch.Generator().manual_seed(seed)
    packed = normal(generator, batch, math.prod(hw), 3 * heads * dim + 1).to(dtype)[..., :-1]
    q, k, v = (x.unflatten(-1, (heads, dim)) for x in packed.chunk(3, -1))
    w1, w2 = (normal(generator, heads, dim, dim) / dim**0.5 for _ in range(2))
    state = state_dtype(dtype)
    return {'q': q, 'k': k, 'v': v, 'w1': w1.to(state), 'w2': w2.to(state)}


def make_dwconv(hw, dim=6, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packed = normal(generator, batch, math.prod(hw), 3 * dim + 1).to(dtype)[..., :-1]
    q, k, v = packed.chunk(3, -1)
    return {'q': q, 'k': k, 'v': v, 'w3': (normal(generator, dim, 3, 3) / 3).to(state_dtype(dtype))}


def call_glu(inputs, hw, scale=SCALE, **options):
    return ttt_glu(**inputs, scale=scale, **options)


def call_dwconv(inputs, hw, scale=SCALE, **options):
    return ttt_dwconv(**inputs, hw=hw, scale=scale, **options)


def arguments(inputs, hw):
    """Those of the registered op, up to `scale`."""
    return (*inputs.values(), *(hw if 'w3' in inputs else ()))


def primal(inputs, hw, damping=True, scale=SCALE):
    reference = dwconv_reference if 'w3' in inputs else glu_reference
    return reference.primal(*arguments(inputs, hw), scale, damping)


@dataclasses.dataclass
class Case:
    make: Callable
    call: Callable
    op: Callable
    op_backward: Callable


NAMESPACE = torch.ops.ttt_kernels
CASES = {
    'glu': Case(make_glu, call_glu, NAMESPACE.ttt_glu, NAMESPACE.ttt_glu_backward),
    'dwconv': Case(make_dwconv, call_dwconv, NAMESPACE.ttt_dwconv, NAMESPACE.ttt_dwconv_backward),
}


def with_gradients(function, inputs, *args, seed=1, **options):
    """Output and gradients by name, for a random gradient of the output."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    output = function(leaves, *args, **options)
    grad = normal(torch.Generator().manual_seed(seed), *output.shape).to(output.dtype)
    grads = torch.autograd.grad(output, list(leaves.values()), grad)
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
