"""causal_conv: one unused output, FLOPs.

What holds for every op is in test_ops.py.
"""

import torch
from convolutions import make
from torch.utils.flop_counter import FlopCounterMode

from ttt_kernels import causal_conv


def test_one_unused_output():
    inputs = {n: x.requires_grad_() for n, x in make(7).items()}
    ways = {'directions': ('forward', 'backward'), 'backend': 'reference'}
    leaves = list(inputs.values())
    for used in (0, 1):
        actual = causal_conv(*leaves, **ways)[used]
        expected = causal_conv(leaves[0], leaves[1 + used], **ways)[0]
        actual, expected = (
            torch.autograd.grad(y.sum(), (leaves[0], leaves[1 + used])) for y in (actual, expected)
        )
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_flops_are_those_of_the_convolutions():
    x, weight, other = (t.requires_grad_() for t in make(7, dtype=torch.float32).values())
    counter = FlopCounterMode(display=False)
    with counter:
        sum(causal_conv(x, weight, other)).sum().backward()
    forward = 2 * 4 * 2 * x.numel()
    assert counter.get_total_flops() == 3 * forward
