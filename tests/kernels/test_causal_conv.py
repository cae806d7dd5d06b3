"""causal_conv: reference, numba and, in the interpreter, the kernels against the definition."""

import pytest
import torch
import torch.nn.functional as F
from convolutions import call, make, primal

from ttt_kernels import causal_conv

inside = pytest.mark.interpreter
# Sums in another order; in half precision the results are rounded, and nothing else.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
# Tokens, scans, weights, channels, taps.
SIZES = [
    (1, 'b', 1, 16, 4),
    (2, 'fb', 2, 5, 4),
    (3, 'bf', 2, 6, 8),
    (37, 'fb', 2, 70, 3),
    (130, 'f', 1, 64, 1),
]


@pytest.fixture(params=['reference', 'numba'])
def backend(request):
    if request.param == 'numba':
        pytest.importorskip('numba', reason='numba is not installed')
    return request.param


def test_the_definition_is_a_conv1d_of_each_scan():
    inputs = make(9, 'fb', weights=1)
    x, weight = inputs.values()
    found = primal(inputs, 'fb')
    for r, turn in enumerate(((), (1,))):
        past = F.pad(x[:, :, r].flip(turn).mT, (3, 0))
        expected = F.conv1d(past, weight[r][:, None], groups=6).mT.flip(turn)
        torch.testing.assert_close(found[:, :, r], expected)


def test_one_output_that_nobody_uses(backend):
    inputs = {n: x.requires_grad_() for n, x in make(7).items()}
    ways = {'directions': ('forward', 'backward'), 'backend': backend}
    leaves = list(inputs.values())
    for used in (0, 1):
        found = causal_conv(*leaves, **ways)[used]
        expected = causal_conv(leaves[0], leaves[1 + used], **ways)[0]
        found, expected = (
            torch.autograd.grad(y.sum(), (leaves[0], leaves[1 + used])) for y in (found, expected)
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_a_token_sees_its_past_alone(backend):
    inputs = make(9, weights=1)
    before = call(inputs, 'fb', backend)
    inputs['x'] = inputs['x'].clone()
    inputs['x'][:, 4] += 1
    changed = (call(inputs, 'fb', backend) != before).any(-1).any(0)
    assert changed[:, 0].nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert changed[:, 1].nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_flops_are_those_of_the_convolutions():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, other = (t.requires_grad_() for t in make(7, dtype=torch.float32).values())
    counter = FlopCounterMode(display=False)
    with counter:
        sum(causal_conv(x, weight, other)).sum().backward()
    forward = 2 * 4 * 2 * x.numel()
    assert counter.get_total_flops() == 3 * forward
