"""ttt_dwconv's numba kernels against the fp64 definition, and what holds on every CPU."""

import pytest
import torch
from inner_steps import CASES, SCALE, make_dwconv
from kernel_testing import assert_same, with_gradients

from ttt_kernels import ttt_dwconv

pytest.importorskip('numba', reason='numba is not installed')
CASE = CASES['dwconv']
# Sums in another order; in half precision the results are rounded, and nothing else.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def on_numba(inputs, hw, **options):
    return CASE.call(inputs, hw, backend='numba', **options)


def agrees(inputs, hw, **options):
    exact = {n: x.double() for n, x in inputs.items()}
    found = with_gradients(on_numba, inputs, hw, **options)
    expected = with_gradients(CASE.primal, exact, hw, **options)
    assert_same(found, expected, TOLERANCE[inputs['q'].dtype])
    assert found[0].dtype == inputs['q'].dtype
    assert all(g.dtype == inputs[n].dtype for n, g in found[1].items())


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ('hw', 'dim'),
    [((1, 1), 16), ((1, 7), 32), ((7, 1), 5), ((3, 5), 1), ((9, 13), 33), ((14, 14), 64)],
)
def test_output_and_every_gradient_agree(hw, dim, dtype):
    agrees(make_dwconv(hw, dim, dtype=dtype), hw)


def test_the_plain_gradient():
    agrees(make_dwconv((6, 5), 20), (6, 5), damping=False)


@pytest.mark.parametrize('name', ['q', 'k', 'v'])
def test_a_nan_stays_in_its_image_and_channel(name):
    hw = (4, 5)
    inputs = make_dwconv(hw, dim=18, batch=3, dtype=torch.float32)
    expected = with_gradients(on_numba, inputs, hw)
    inputs[name] = inputs[name].clone()
    inputs[name][1, :, 17] = torch.nan
    output, grads = with_gradients(on_numba, inputs, hw)
    assert output[1, :, 17].isnan().any()
    elsewhere = torch.ones(3, 1, 18, dtype=torch.bool)
    elsewhere[1, :, 17] = False
    for found, other in ((output, expected[0]), *((grads[n], expected[1][n]) for n in 'qkv')):
        assert torch.equal(found.where(elsewhere, 0), other.where(elsewhere, 0))


def test_strided_and_expanded_inputs():
    hw = (4, 5)
    inputs = make_dwconv(hw, dim=20, batch=1, dtype=torch.float32)
    turned = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in inputs.items()}
    assert torch.equal(on_numba(turned, hw), on_numba(inputs, hw))
    agrees({**inputs, 'k': inputs['k'][:, :1].expand_as(inputs['k'])}, hw)


def test_an_empty_batch():
    output, grads = with_gradients(on_numba, make_dwconv((2, 3), batch=0), (2, 3))
    assert output.shape == (0, 6, 6)
    assert not grads['w3'].any()


def test_the_same_bits_with_any_number_of_threads():
    hw = (9, 7)
    inputs = make_dwconv(hw, dim=48, batch=3, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            # Not the gradient of w3, which torch sums over the images.
            output, grads = with_gradients(on_numba, inputs, hw)
            found.append((output, *(grads[n] for n in 'qkv')))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(others, found[0], strict=True))


def test_opcheck():
    inputs = make_dwconv((3, 4), dim=18, dtype=torch.float32)
    rest = CASE.rest((3, 4), backend='numba')
    output, g = CASE.op(*inputs.values(), *rest)
    torch.library.opcheck(CASE.op_backward.default, (output + 1, *inputs.values(), g, *rest))
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    torch.library.opcheck(CASE.op.default, (*leaves, *rest))


def test_it_is_what_a_cpu_runs(monkeypatch):
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)
    inputs = make_dwconv((9, 13), dim=32, dtype=torch.float32)
    found = ttt_dwconv(**inputs, hw=(9, 13), scale=SCALE)
    assert torch.equal(found, on_numba(inputs, (9, 13)))
    assert not torch.equal(found, CASE.call(inputs, (9, 13)))
