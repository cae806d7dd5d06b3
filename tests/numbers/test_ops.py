"""Every op in fp32, bf16 and fp16 against itself in fp64, from 1 to 66 800 tokens.

The bounds, `Truth.allowed`, are a few roundings of the type; precision.py derives them.
"""

import pytest
import torch
from operations import MAPS, OPERATIONS
from precision import DEVICES, ROUNDINGS, ROUNDINGS_OF_AN_OP, TYPES, Truth, evaluate

stress = pytest.mark.stress


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize(
    'tokens', [t if t < 66_800 else pytest.param(t, marks=stress) for t in MAPS]
)
@pytest.mark.parametrize('name', OPERATIONS)
def test_output_and_every_gradient(name, tokens, device):
    operation, hw = OPERATIONS[name], MAPS[tokens]
    inputs = operation.make(hw)
    generator = torch.Generator().manual_seed(1)
    shape = operation.call(inputs, hw).shape
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    truth = Truth(lambda x: operation.call(x, hw), inputs, grad)
    for dtype in TYPES:
        kept = {n: torch.float32 for n in inputs if n not in operation.tokens}
        low = {n: x.to(device, kept.get(n, dtype)) for n, x in inputs.items()}
        found = evaluate(lambda x: operation.call(x, hw), low, grad.to(device))
        assert {n: x.dtype for n, x in found.items() if n in inputs} == {
            n: kept.get(n, dtype) for n in inputs
        }
        truth.assert_near(
            found,
            dtype,
            types=kept,
            cancelling=operation.cancelling,
            draws=1 if tokens == 66_800 else 2,
            # The kernels on a GPU round the operands of their products to the type.
            roundings=ROUNDINGS_OF_AN_OP if device == 'cpu' else ROUNDINGS,
        )
