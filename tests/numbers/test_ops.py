"""Every op in fp32, bf16 and fp16 against itself in fp64, from 1 to 66 800 tokens.

The bounds, `Truth.allowed`, are a few roundings of the type; precision.py derives them.
"""

import pytest
import torch
from operations import MAPS, OPERATIONS
from precision import DEVICES, ROUNDINGS, ROUNDINGS_OF_AN_OP, TYPES, UNIT, Truth, evaluate

from ttt_kernels import available

stress = pytest.mark.stress
COMPILED = {'cpu': 'numba', 'cuda': 'triton'}
BACKENDS = [
    pytest.param(d, backend, id=f'{d}, {backend}')
    for d in DEVICES
    for backend in ('reference', COMPILED[d])
]


@pytest.mark.parametrize(('device', 'backend'), BACKENDS)
@pytest.mark.parametrize(
    'tokens', [t if t < 66_800 else pytest.param(t, marks=stress) for t in MAPS]
)
@pytest.mark.parametrize('name', OPERATIONS)
def test_output_and_every_gradient(name, tokens, device, backend):
    operation, hw = OPERATIONS[name], MAPS[tokens]
    convolved = operation.convolved if (device, backend) == ('cpu', 'reference') else ()
    if backend == 'numba' and (missing := available()[name]['numba']):
        pytest.skip(missing)
    inputs = operation.make(hw)
    generator = torch.Generator().manual_seed(1)
    shape = operation.call(inputs, hw).shape
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    truth = Truth(lambda x: operation.call(x, hw), inputs, grad)
    for dtype in TYPES:
        kept = {n: torch.float32 for n in inputs if n not in operation.tokens}
        low = {n: x.to(device, kept.get(n, dtype)) for n, x in inputs.items()}
        found = evaluate(lambda x: operation.call(x, hw, backend=backend), low, grad.to(device))
        assert {n: x.dtype for n, x in found.items() if n in inputs} == {
            n: kept.get(n, dtype) for n in inputs
        }
        truth.assert_near(
            found,
            dtype,
            types=kept,
            cancelling=operation.cancelling,
            one_by_one=dict.fromkeys(convolved, tokens),
            draws=1 if tokens == 66_800 else 2,
            # The kernels on a GPU round the operands of their products to the type.
            roundings=ROUNDINGS_OF_AN_OP if device == 'cpu' else ROUNDINGS,
        )


@pytest.mark.parametrize(
    ('name', 'parameters'),
    [
        ('ttt_linear', ('w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale')),
        ('ttt_dwconv', ('w3',)),
        ('causal_conv', ('weight', 'other')),
    ],
)
def test_compiled_sums_over_many_tokens_lose_no_more_than_the_reference(name, parameters):
    if missing := available()[name]['numba']:
        pytest.skip(missing)
    operation, hw = OPERATIONS[name], (100, 150)
    inputs = operation.make(hw)
    grad = torch.randn(operation.call(inputs, hw).shape, dtype=torch.float64)
    exact = evaluate(lambda x: operation.call(x, hw), inputs, grad)
    low = {n: x.float() for n, x in inputs.items()}
    off = {}
    for backend in ('reference', 'numba'):
        found = evaluate(lambda x, b=backend: operation.call(x, hw, backend=b), low, grad)
        off[backend] = {n: (found[n] - exact[n]).norm() / exact[n].norm() for n in parameters}
    for n in parameters:
        assert off['numba'][n] <= 1.5 * off['reference'][n] + 4 * UNIT[torch.float32], n
