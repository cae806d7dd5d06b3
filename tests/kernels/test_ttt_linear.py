"""ttt_linear: dual form, states that are kept.

What holds for every op is in test_ops.py.
"""

import pytest
import torch
from kernel_testing import assert_same, with_gradients
from scans import NAMES, OP, call, definition, make
from torch._subclasses import FakeTensorMode

from ttt_kernels.ttt_linear.definition import Inputs, dual

# fp64 has 16 digits; sums over at most some hundred tokens and a chain of LayerNorms cost three.
FP64 = 1e-12


# ------------------------------------------------------------------------------------- definition


@pytest.mark.parametrize(
    ('tokens', 'size'),
    [(t, 16) for t in (1, 15, 17, 52)] + [(17, 1), (17, 4), (17, 17), (5, 40)],
)
def test_the_dual_form_agrees_with_every_gradient(tokens, size):
    inputs = make(tokens, size=size, dim=4)
    expected = with_gradients(definition, inputs, size=size)
    actual = with_gradients(lambda x: dual(Inputs(**x), 'fb', size, 1e-6), inputs)
    assert expected[1].keys() == set(NAMES)
    assert_same(actual, expected, FP64)


# ------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ('dtype', 'kept'),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_the_state_goes_where_the_saved_z_takes_it(dtype, kept):
    inputs = make(16, 'f', batch=1, heads=1, dim=8, dtype=dtype)
    _, z, w_kept, c_kept = OP(*inputs.values(), 'f', 16, 1e-6, 'reference')
    assert z.dtype == kept
    assert w_kept.dtype == c_kept.dtype == torch.float32
    z, k, v = (x[0, :, 0, 0].float() for x in (z, inputs['k'], inputs['v']))
    w0, b0, weight, bias = (inputs[n][0, 0] for n in ('w0', 'b0', 'ln_weight', 'ln_bias'))
    exact = k @ w0 + b0
    exact = exact - exact.mean(-1, keepdim=True)
    # Rounded once.
    unit = torch.finfo(kept).eps / 2
    torch.testing.assert_close(z, exact, rtol=unit, atol=1e-6)
    z.requires_grad_()
    loss = (
        k + torch.nn.functional.layer_norm(z, (8,), weight, bias, eps=1e-6) - v
    ).square().sum() / 2
    (g,) = torch.autograd.grad(loss, z)
    step = inputs['token_scale'][0, -1] * inputs['eta'][0, :, 0, 0, None]
    expected = w0 - w0.mean(-1, keepdim=True) - (step * k).mT @ g
    # One product in fp32, in another order.
    torch.testing.assert_close(w_kept[0, 0, 0, 0], expected, rtol=0, atol=2e-6)


# ---------------------------------------------------------------------------------- autocast, fakes


def test_steps_that_autocast_has_rounded():
    # Under autocast they come out of a linear layer in bf16.
    inputs = make(35, dtype=torch.float32)
    steps = inputs['eta'].bfloat16()
    tokens = {n: inputs[n].bfloat16() for n in 'qkv'}
    with torch.autocast('cpu', dtype=torch.bfloat16):
        actual = call({**inputs, 'eta': steps})
    assert torch.equal(actual, call({**inputs, **tokens, 'eta': steps.float()}))


@pytest.mark.parametrize(
    ('size', 'tokens', 'states'),
    # One in 32 mini-batches, or in 512 tokens, or each; a state at the end.
    [(1, 70, 3), (4, 300, 3), (16, 1100, 3), (24, 1100, 3), (64, 1100, 3), (600, 1300, 3)],
)
def test_states_that_are_kept(size, tokens, states):
    inputs = make(tokens, size=size, batch=1, heads=1, dtype=torch.float32)
    options = ('fb', size, 1e-6, 'reference')
    _, _, *kept = OP(*inputs.values(), *options)
    with FakeTensorMode() as mode:
        _, _, *fakes = OP(*(mode.from_tensor(x) for x in inputs.values()), *options)
    expected = [(1, 2, 1, states, 6, 6), (1, 2, 1, states, 6)]
    assert [x.shape for x in kept] == [x.shape for x in fakes] == expected
