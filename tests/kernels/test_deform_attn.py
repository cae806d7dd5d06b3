"""deform_attn: no queries, half types, FLOPs.

What holds for every op is in test_ops.py.
"""

import torch
from kernel_testing import error, with_gradients
from sampling import PYRAMID, call, definition, make
from torch.utils.flop_counter import FlopCounterMode

OP = torch.ops.ttt_kernels.deform_attn
OP_BACKWARD = torch.ops.ttt_kernels.deform_attn_backward


def test_no_queries_give_nothing():
    output, grads = with_gradients(call, make(queries=0))
    assert output.shape == (2, 0, 15)
    assert grads['value'].eq(0).all()


def test_all_inputs_in_half_precision():
    inputs = make(dtype=torch.bfloat16)
    output, grads = with_gradients(call, inputs)
    assert {output.dtype, *(g.dtype for g in grads.values())} == {torch.bfloat16}
    exact = {n: x.double() for n, x in inputs.items()}
    assert error(output, definition(exact)) < 1e-2


def test_flops_follow_the_formula():
    inputs = {n: x.requires_grad_() for n, x in make().items()}
    with FlopCounterMode(display=False) as counter:
        call(inputs).sum().backward()
    samples = 2 * 9 * 3 * len(PYRAMID) * 4
    counts = counter.get_flop_counts()['Global']
    assert counts[OP] == 2 * 4 * samples * 5
    assert counts[OP_BACKWARD] == 2 * counts[OP]
