"""Ops at tokens as models have them, with an error as small as the reference's in the same type.

A constant bound hides an instability: tokens of size 1 say nothing about those of size 0.1, at
which a training starts.

    pytest tests/numbers/test_model_tokens.py -s

prints each error of a kernel beside the reference's.
"""

import pytest
import torch
from kernel_testing import normal
from ops import OPS
from precision import OUTPUT, UNIT, evaluate

interpreter = pytest.mark.interpreter
# A kernel sums in another order than the reference, and on another path. In half precision it
# also rounds the operands of a chain of five products, the reference only the tokens.
FACTOR = {torch.float32: 4, torch.float16: 4}


def as_training_starts(inputs, size):
    """Tokens of a size, and a small state."""
    factors = {**dict.fromkeys('qkv', size), 'w0': 0.1, 'b0': 0.2, 'ln_bias': 0}
    return {n: x * factors.get(n, 1) for n, x in inputs.items()}


def check(op, hw, inputs, dtype, backend, title, **options):
    grad = normal(torch.Generator().manual_seed(1), *op.call(inputs, hw, **options).shape)

    def results(backend, inputs):
        return evaluate(lambda x: op.call(x, hw, backend=backend, **options), inputs, grad)

    def errors(results):
        return {n: ((x.double() - exact[n]).norm() / exact[n].norm()).item() for n, x in results}

    exact, low = results('reference', inputs), op.cast(inputs, dtype)
    expected = errors(results('reference', low).items())
    found = errors(results(backend, low).items())
    # A gradient that is nearer than the output, behind the same scan, is so by luck.
    least = max(expected[OUTPUT], UNIT[dtype])
    times = {n: e / max(expected[n], least) for n, e in found.items()}
    worst = max(times.keys() - {OUTPUT}, key=times.get)
    print(
        f'| {title} | {expected[OUTPUT]:.1e} | {found[OUTPUT]:.1e} '
        f'| {expected[worst]:.1e} | {found[worst]:.1e} ({worst}) |'
    )
    wrong = {n: f'{t:.2g}' for n, t in times.items() if not t <= FACTOR[dtype]}
    assert not wrong, wrong


@interpreter
@pytest.mark.parametrize('size', [1, 0.3, 0.1, 0.03, 1e-3])
@pytest.mark.parametrize(
    ('dim', 'mini_batch', 'apart', 'dtype'),
    [
        (32, 16, False, torch.float32),
        (48, 16, True, torch.float32),
        (32, 24, True, torch.float32),
        (64, 16, True, torch.float16),
        (32, 32, False, torch.float16),
    ],
)
def test_small_tokens(dim, mini_batch, apart, dtype, size, cut):
    cut(3, apart)
    op, hw = OPS['ttt_linear'], (12, 13)
    inputs = op.make(hw, batch=1, heads=1, dim=dim, size=mini_batch)
    title = f'{size} | {dtype}, d {dim}, b {mini_batch}'.replace('torch.', '')
    check(op, hw, as_training_starts(inputs, size), dtype, 'triton', title, size=mini_batch)
