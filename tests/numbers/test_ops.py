"""Every op in fp32, bf16 and fp16 against itself in fp64, from 1 to 66 800 tokens.

The bounds, `Truth.allowed`, are a few roundings of the type; precision.py derives them.
"""

import pytest
import torch
from kernel_testing import normal
from ops import OPS
from precision import (
    DEVICES,
    MAPS,
    ROUNDINGS,
    ROUNDINGS_OF_AN_OP,
    TYPES,
    UNIT,
    Truth,
    evaluate,
)

from ttt_kernels import available

stress = pytest.mark.stress
COMPILED = {'cpu': 'numba', 'cuda': 'triton'}
# One head of 32 channels of one image.
SIZES = {'batch': 1, 'heads': 1, 'dim': 32}
VARIANTS = [
    pytest.param(
        op, tokens, device, backend,
        id=f'{name}, {tokens}, {device}, {backend}',
        marks=stress if tokens == 66_800 else (),
    )
    for name, op in OPS.items()
    for tokens in MAPS
    for device in DEVICES
    for backend in ('reference', COMPILED[device])
    if backend != 'numba' or 'no numba' not in str(available()[op.name]['numba'])
]  # fmt: skip


@pytest.mark.parametrize(('op', 'tokens', 'device', 'backend'), VARIANTS)
def test_output_and_every_gradient(op, tokens, device, backend):
    hw = MAPS[tokens]
    if backend == 'numba' and (missing := available()[op.name]['numba']):
        pytest.skip(missing)
    inputs = op.make(hw, **SIZES)
    grad = normal(torch.Generator().manual_seed(1), *op.call(inputs, hw).shape)
    truth = Truth(lambda x: op.call(x, hw, backend='reference'), inputs, grad)
    convolved = op.convolved if (device, backend) == ('cpu', 'reference') else ()
    for dtype in TYPES:
        found = evaluate(
            lambda x: op.call(x, hw, backend=backend),
            op.cast(inputs, dtype, device),
            grad.to(device),
        )
        truth.assert_near(
            found,
            dtype,
            types={n: torch.float32 for n in inputs if n not in op.tokens},
            cancelling=op.cancelling,
            one_by_one=dict.fromkeys(convolved, tokens),
            draws=1 if tokens == 66_800 else 2,
            # The kernels on a GPU round the operands of their products to the type.
            roundings=ROUNDINGS_OF_AN_OP if device == 'cpu' else ROUNDINGS,
        )


def test_numbas_sums_over_many_tokens_lose_no_more_than_the_reference():
    if missing := available()['ttt_linear']['numba']:
        pytest.skip(missing)
    op, hw = OPS['ttt_linear'], (100, 150)
    parameters = ('w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale')
    inputs = op.make(hw, **SIZES)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(op.call(inputs, hw).shape, dtype=torch.float64, generator=generator)
    exact = evaluate(lambda x: op.call(x, hw, backend='reference'), inputs, grad)
    low = {n: x.float() for n, x in inputs.items()}
    off = {}
    for backend in ('reference', 'numba'):
        found = evaluate(lambda x, b=backend: op.call(x, hw, backend=b), low, grad)
        off[backend] = {n: (found[n] - exact[n]).norm() / exact[n].norm() for n in parameters}
    for n in parameters:
        # numba loses twice as much of token_scale as the reference, on average of six gradients.
        more = 4 if n == 'token_scale' else 1.5
        assert off['numba'][n] <= more * off['reference'][n] + 4 * UNIT[torch.float32], n
