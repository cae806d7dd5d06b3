"""The inner steps' numba kernels against the fp64 definitions, and what holds on every CPU."""

import pytest
import torch
from inner_steps import CASES
from kernel_testing import assert_same, with_gradients

pytest.importorskip('numba', reason='numba is not installed')
# Sums in another order; in half precision the results are rounded, and nothing else.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


@pytest.fixture(params=['glu', 'dwconv'])
def case(request):
    return CASES[request.param]


def on_numba(case):
    return lambda inputs, hw, **options: case.call(inputs, hw, backend='numba', **options)


def agrees(case, inputs, hw, **options):
    exact = {n: x.double() for n, x in inputs.items()}
    found = with_gradients(on_numba(case), inputs, hw, **options)
    expected = with_gradients(case.primal, exact, hw, **options)
    assert_same(found, expected, TOLERANCE[inputs['q'].dtype])
    assert found[0].dtype == inputs['q'].dtype
    assert all(g.dtype == inputs[n].dtype for n, g in found[1].items())


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ('hw', 'dim'),
    [((1, 1), 16), ((1, 7), 32), ((7, 1), 5), ((3, 5), 1), ((9, 13), 33), ((14, 14), 64)],
)
def test_output_and_every_gradient_agree(case, hw, dim, dtype):
    agrees(case, case.make(hw, dim, dtype=dtype), hw)


def test_the_plain_gradient(case):
    agrees(case, case.make((6, 5), 20), (6, 5), damping=False)


@pytest.mark.parametrize('tokens', [512, 513, 1100])
def test_sums_over_several_programs(tokens):
    agrees(CASES['glu'], CASES['glu'].make((1, tokens), 20), (1, tokens))


def test_gates_from_the_smallest_to_the_largest_number():
    case, hw = CASES['glu'], (1, 9)
    inputs = case.make(hw, 1, batch=1, heads=1, dtype=torch.float32)
    gates = torch.tensor([-1e30, -200, -88, -17, 0, 17, 88, 200, 1e30])
    inputs['q'] = gates.reshape(1, 9, 1, 1)
    inputs['w1'], inputs['w2'] = torch.ones(2, 1, 1, 1)
    # A step of nothing: the gated unit itself.
    found = on_numba(case)(inputs, hw, scale=0.0).flatten()
    expected = gates.double() * torch.nn.functional.silu(gates.double())
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-30)


def test_an_inner_gradient_of_zero_is_not_damped(case):
    inputs = case.make((3, 4), 16)
    agrees(case, {**inputs, 'v': torch.zeros_like(inputs['v'])}, (3, 4))


@pytest.mark.parametrize('name', ['q', 'k', 'v'])
def test_a_nan_stays_in_its_image_and_head(case, name):
    hw, last = (4, 5), (-1,) if case.name == 'ttt_dwconv' else (-1, slice(None))
    inputs = case.make(hw, dim=18, batch=3, dtype=torch.float32)
    expected = with_gradients(on_numba(case), inputs, hw)
    inputs[name] = inputs[name].clone()
    inputs[name][(1, slice(None), *last)] = torch.nan
    output, grads = with_gradients(on_numba(case), inputs, hw)
    assert output[(1, slice(None), *last)].isnan().any()
    elsewhere = torch.ones_like(output, dtype=torch.bool)
    elsewhere[(1, slice(None), *last)] = False
    for found, other in ((output, expected[0]), *((grads[n], expected[1][n]) for n in 'qkv')):
        assert torch.equal(found.where(elsewhere, 0), other.where(elsewhere, 0))


def test_strided_and_expanded_inputs(case):
    hw = (4, 5)
    inputs = case.make(hw, dim=20, batch=1, dtype=torch.float32)
    turned = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in inputs.items()}
    assert torch.equal(on_numba(case)(turned, hw), on_numba(case)(inputs, hw))
    agrees(case, {**inputs, 'k': inputs['k'][:, :1].expand_as(inputs['k'])}, hw)


def test_an_empty_batch(case):
    inputs = case.make((2, 3), batch=0)
    output, grads = with_gradients(on_numba(case), inputs, (2, 3))
    assert output.shape == inputs['q'].shape
    assert not any(g.any() for g in grads.values())


def test_the_same_bits_with_any_number_of_threads(case, monkeypatch):
    monkeypatch.setattr('ttt_kernels._numba._WORTH_A_THREAD', 1)
    hw = (29, 37)
    inputs = case.make(hw, dim=48, batch=3, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            output, grads = with_gradients(on_numba(case), inputs, hw)
            found.append((output, *grads.values()))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(others, found[0], strict=True))


def test_parameters_can_still_be_resized(case):
    inputs = case.make((3, 4), dim=16, dtype=torch.float32)
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    on_numba(case)(leaves, (3, 4)).sum().backward()
    assert all(x.untyped_storage().resizable() for n, x in inputs.items() if n not in 'qkv')


def test_opcheck(case):
    inputs = case.make((3, 4), dim=18, dtype=torch.float32)
    rest = case.rest((3, 4), backend='numba')
    output, g = case.op(*inputs.values(), *rest)
    torch.library.opcheck(case.op_backward.default, (output + 1, *inputs.values(), g, *rest))
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    torch.library.opcheck(case.op.default, (*leaves, *rest))


def test_it_is_what_a_cpu_runs(case, monkeypatch):
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)
    hw = (9, 13)
    inputs = case.make(hw, dim=32, dtype=torch.float32)
    found = case.call(inputs, hw, backend=None)
    assert torch.equal(found, on_numba(case)(inputs, hw))
    assert not torch.equal(found, case.call(inputs, hw, backend='reference'))
