"""ttt_glu, ttt_dwconv and ttt_mlp: scale and options, underflow.

What holds for every op is in test_ops.py.
"""

import math

import pytest
import torch
from kernel_testing import error
from ops import STEPS, inner_gradient

import ttt_kernels

# The option that changes the inner step, at its other value.
OTHER = {'ttt_glu': {'damping': False}, 'ttt_dwconv': {'damping': False}, 'ttt_mlp': {'loss': 'l2'}}
every_step = pytest.mark.parametrize('op', STEPS.values(), ids=STEPS)


@every_step
def test_the_step_matters_and_has_the_published_scale(op):
    inputs = op.make((4, 4))
    actual = op.call(inputs, (4, 4), scale=1 / 3)
    if op.name != 'ttt_mlp':  # which has no default
        size = {'hw': (4, 4)} if op.name == 'ttt_dwconv' else {}
        function = getattr(ttt_kernels, op.name)
        assert torch.equal(function(**inputs, **size, backend='reference'), actual)
    assert error(actual, op.call(inputs, (4, 4), scale=0.0)) > 1e-2
    assert error(actual, op.call(inputs, (4, 4), scale=1 / 3, **OTHER[op.name])) > 1e-3


@every_step
def test_an_empty_batch_has_a_derivative_of_torch_func(op):
    inputs = op.make((3, 5), batch=0)
    grad = torch.func.grad(lambda q: op.call({**inputs, 'q': q}, (3, 5)).sum())(inputs['q'])
    assert grad.shape == inputs['q'].shape


# -------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@every_step
def test_a_detection_sized_map_does_not_underflow(op, dtype):
    # 66 800 tokens: v/N in half precision has lost everything below 6e-8·N, or most of its bits.
    hw = (200, 334)
    inputs = op.make(hw, dim=4, batch=1, dtype=dtype)
    exact = {n: x.double() for n, x in inputs.items()}
    expected = inner_gradient(op, exact, hw, 'reference')

    def off(g):
        return ((g - expected).norm() / expected.norm()).item()

    # fp32 sums of 66 800 terms that nearly cancel.
    assert off(inner_gradient(op, inputs, hw, None)) < 4e-4
    scaled = (exact['v'] / math.prod(hw)).half().double() * math.prod(hw)
    assert off(inner_gradient(op, {**exact, 'v': scaled}, hw, 'reference')) > 4e-4
