"""ttt_kernels.deform_attn compiled by numba for a CPU, against its reference."""

import pytest
import torch
from kernel_testing import assert_same, with_gradients
from sampling import NAMES, PYRAMID, call, call_fused, fused, make

pytest.importorskip('numba', reason='numba is not installed')
# The two sides differ by the order of their sums, and in half types by one rounding.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('shapes', [PYRAMID, ((1, 1),), ((8, 6), (4, 3), (2, 2))])
def test_every_gradient_equals_that_of_the_reference(shapes, dtype):
    inputs = make(shapes, dtype=dtype if dtype == torch.float64 else torch.float32)
    inputs['value'] = inputs['value'].to(dtype)
    found, expected = (
        with_gradients(lambda x, b=backend: call(x, shapes, backend=b), inputs)
        for backend in ('numba', 'reference')
    )
    assert found[0].dtype == dtype
    assert {n: g.dtype for n, g in found[1].items()} == {n: x.dtype for n, x in inputs.items()}
    assert_same(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize('shared', [True, False])
def test_fused_gradients(shared):
    inputs = fused(make(), shared=shared)
    found, expected = (
        with_gradients(lambda x, b=backend: call_fused(x, backend=b), inputs)
        for backend in ('numba', 'reference')
    )
    assert_same(found, expected, 1e-12)


def test_sizes_in_a_tensor_are_checked():
    inputs = make()
    assert torch.equal(
        call(inputs, torch.tensor(PYRAMID), backend='numba'), call(inputs, backend='numba')
    )
    with pytest.raises(ValueError, match='value has S = 43 pixels, but the 4 levels'):
        call(inputs, torch.ones(4, 2, dtype=torch.int64), backend='numba')


def test_locations_that_are_no_places():
    inputs = make(dtype=torch.float32)
    expected = call(inputs, backend='numba')
    inputs['sampling_locations'][0, 3, 1, 0, 0] = torch.tensor([float('nan'), 0.5])
    inputs['sampling_locations'][0, 4, 1] = float('inf')
    inputs['sampling_locations'][0, 5, 1] = -1e38
    output, grads = with_gradients(lambda x: call(x, backend='numba'), inputs)
    assert output.isnan()[0, 3, 5:10].all()
    assert output[0, 4:6, 5:10].eq(0).all()
    others = torch.ones(2, 9, 15, dtype=torch.bool)
    others[0, 3:6] = False
    assert torch.equal(output[others], expected[others])
    assert grads['sampling_locations'][1].isfinite().all()


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr('ttt_kernels._numba._WORTH_A_THREAD', 1)
    inputs = make(((12, 9), (5, 5)), 60, batch=3, dtype=torch.float32)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                with_gradients(lambda x: call(x, ((12, 9), (5, 5)), backend='numba'), inputs)
            )
    finally:
        torch.set_num_threads(before)
    for output, grads in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(grads[n], results[0][1][n]) for n in NAMES)


def test_no_queries_give_nothing():
    output, grads = with_gradients(lambda x: call(x, backend='numba'), make(queries=0))
    assert output.shape == (2, 0, 15)
    assert grads['value'].eq(0).all()
