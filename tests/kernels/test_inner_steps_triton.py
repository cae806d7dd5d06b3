"""The Triton kernels of the inner steps in Triton's interpreter: small numbers, shared sums.

What holds for every op is in test_ops_triton.py.
"""

import pytest
import torch
import triton
import triton.language as tl
from inner_steps import inner_gradient
from kernel_testing import assert_same, normal, with_gradients
from op_row import FP64, Case
from ops import OPS

interpreter = pytest.mark.interpreter
STEPS = {name: op for name, op in OPS.items() if op.name in ('ttt_glu', 'ttt_dwconv', 'ttt_mlp')}


every_step = pytest.mark.parametrize('op', STEPS.values(), ids=STEPS)


@interpreter
@every_step
def test_one_program_takes_a_whole_sum(op, one_program):
    op.check(Case((3, 40), {'dim': 32, 'batch': 1}), FP64, 'triton', op.kernel_tolerance)


@interpreter
@every_step
def test_small_values_do_not_underflow_in_half_precision(op, several_programs):
    # v/N would be around 1e-6, of which fp16 keeps four bits, as that of a map of 66 800 tokens.
    hw = (20, 30)
    inputs = op.make(hw, dim=32, batch=1, dtype=torch.float16)
    inputs['v'] = inputs['v'] * 2**-10
    g = inner_gradient(op, inputs, hw, 'triton')
    exact = {n: x.double() for n, x in inputs.items()}
    expected = inner_gradient(op, exact, hw, 'reference')
    # The gated model rounds the operands of its products to 11 bits.
    assert ((g - expected).norm() / expected.norm()).item() < 2e-3


@interpreter
@every_step
def test_small_gradients_keep_their_bits_in_half_precision(op, several_programs):
    # dO near the least normal number of fp16: its mean products over the tokens lie far below.
    hw = (14, 14)
    inputs = op.make(hw, dim=32, batch=1, dtype=torch.float16)
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    exact = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    grad = normal(torch.Generator().manual_seed(1), *inputs['q'].shape)
    grad = (grad.abs() * 2**-13).half()
    names = [n for n in inputs if n.startswith('w')]
    actual, expected = (
        torch.autograd.grad(
            op.call(x, hw, backend=backend), [x[n] for n in names], grad.to(x['q'].dtype)
        )
        for x, backend in ((inputs, 'triton'), (exact, 'reference'))
    )
    for name, x, y in zip(names, actual, expected, strict=True):
        assert ((x - y).norm() / y.norm()).item() < 5e-3, name


@interpreter
@pytest.mark.parametrize(('tokens', 'sums'), [(1, 1), (17, 3), (196, 768), (66_800, 3), (6400, 0)])
def test_every_token_has_one_program(tokens, sums):
    from ttt_kernels import _launch

    splits, span = _launch.split(tokens, sums, 32)
    assert span % 32 == 0
    assert (splits - 1) * span < tokens <= splits * span


@interpreter
@pytest.mark.parametrize('splits', [1, 16, 37])
def test_partial_sums_add_up(splits):
    from ttt_kernels import _launch

    partials = normal(torch.Generator().manual_seed(0), 3, splits, 5, 33)
    expected = partials.sum(1) * 0.25 / 7
    torch.testing.assert_close(_launch.add_up(partials, 0.25, 7), expected, rtol=0, atol=1e-14)


@triton.jit
def step_of_integers(x, out, OP: tl.constexpr):
    number = tl.load(x)
    if OP == 'add':
        tl.store(out, number + number)
    elif OP == 'sub':
        tl.store(out, -2 - number)
    else:
        tl.store(out, number * number)


@interpreter
@pytest.mark.parametrize(('op', 'fits'), [('add', 2**30), ('sub', 2**31 - 1), ('mul', 46_341)])
def test_an_index_beyond_its_type_is_seen(op, fits):
    out, most = torch.zeros(1, dtype=torch.int32), torch.tensor([fits - 1], dtype=torch.int32)
    step_of_integers[(1,)](most, out, OP=op)
    expected = {'add': 2**31 - 2, 'sub': -(2**31), 'mul': 46_340**2}[op]
    assert out.item() == expected
    with pytest.raises(Exception, match=f'overflow: {op}'):
        step_of_integers[(1,)](most + 1, out, OP=op)


@interpreter
def test_one_channel_a_head_of_loud_tokens():
    """The gradient is all along G, of which the damping leaves 1/(‖G‖ + 1)."""
    op, hw = OPS['ttt_glu'], (5, 3)
    inputs = op.make(hw, dim=1, batch=1, dtype=torch.float32)
    inputs |= {n: inputs[n] * 1e3 for n in op.tokens}
    exact = {n: x.double() for n, x in inputs.items()}
    actual = with_gradients(lambda x: op.call(x, hw, backend='triton'), inputs)
    expected = with_gradients(lambda x: op.call(x, hw, backend='reference'), exact)
    assert_same(actual, expected, 1e-5)
