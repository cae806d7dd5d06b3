"""deform_attn: sizes in tensors, odd locations, half types, FLOPs.

What holds for every op is in test_ops.py.
"""

import pytest
import torch
from kernel_testing import error, with_gradients
from sampling import NAMES, PYRAMID, call, definition, fused, make
from torch.utils.flop_counter import FlopCounterMode

from ttt_kernels import deform_attn, deform_attn_fused

OP = torch.ops.ttt_kernels.deform_attn
OP_BACKWARD = torch.ops.ttt_kernels.deform_attn_backward
BACKENDS = ('reference', pytest.param('triton', marks=pytest.mark.interpreter))


def test_gradcheck():
    shapes = ((3, 4), (1, 2))
    inputs = fused(make(shapes, 2, batch=1, heads=1, dim=2, points=2), shapes)
    leaves = [x.requires_grad_() for x in inputs.values()]
    value, reference_points, offsets, logits = leaves
    assert torch.autograd.gradcheck(
        lambda v, r, o, g: deform_attn_fused(v, shapes, r, o, g),
        (value, reference_points, offsets, logits),
    )


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('dtype', [torch.int64, torch.int32])
def test_sizes_in_a_tensor_are_those_in_numbers(backend, dtype):
    inputs = make()
    sizes = torch.tensor(PYRAMID, dtype=dtype)
    expected = with_gradients(call, inputs, backend=backend)
    actual = with_gradients(call, inputs, sizes, backend=backend)
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][n], expected[1][n]) for n in NAMES)
    if backend != 'triton':  # which does not read a tensor on a GPU
        with pytest.raises(ValueError, match='value has S = 43 pixels, but the 4 levels'):
            call(inputs, torch.ones_like(sizes), backend=backend)


def test_no_queries_give_nothing():
    output, grads = with_gradients(call, make(queries=0))
    assert output.shape == (2, 0, 15)
    assert grads['value'].eq(0).all()


def test_pixel_centres_read_the_pixel():
    value = torch.arange(12.0).view(1, 12, 1, 1)
    x, y = torch.meshgrid((torch.arange(4) + 0.5) / 4, (torch.arange(3) + 0.5) / 3, indexing='xy')
    locations = torch.stack([x, y], -1).view(1, 12, 1, 1, 1, 2)
    actual = deform_attn(value, [(3, 4)], locations, torch.ones(1, 12, 1, 1, 1))
    # (i + ½)/4·4 − ½ is off by a rounding or two of positions up to 4.
    torch.testing.assert_close(actual.flatten(), torch.arange(12.0), rtol=0, atol=1e-5)


def test_all_inputs_in_half_precision():
    inputs = make(dtype=torch.bfloat16)
    output, grads = with_gradients(call, inputs)
    assert {output.dtype, *(g.dtype for g in grads.values())} == {torch.bfloat16}
    exact = {n: x.double() for n, x in inputs.items()}
    assert error(output, definition(exact)) < 1e-2


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_location_that_is_no_number_spoils_its_own_query_only(backend):
    inputs = make(dtype=torch.float32)
    expected = call(inputs, backend=backend)
    inputs['sampling_locations'][0, 3, 1, 0, 0] = torch.tensor([float('nan'), 0.5])
    inputs['sampling_locations'][0, 4, 1] = float('inf')
    inputs['sampling_locations'][0, 5, 1] = -1e38
    output, grads = with_gradients(call, inputs, backend=backend)
    assert output.isnan()[0, 3, 5:10].all()
    # Infinitely far outside is outside: zeros.
    assert output[0, 4:6, 5:10].eq(0).all()
    others = torch.ones(2, 9, 15, dtype=torch.bool)
    others[0, 3:6] = False
    assert torch.equal(output[others], expected[others])
    assert grads['sampling_locations'][1].isfinite().all()


def test_flops_follow_the_formula():
    inputs = {n: x.requires_grad_() for n, x in make().items()}
    with FlopCounterMode(display=False) as counter:
        call(inputs).sum().backward()
    samples = 2 * 9 * 3 * len(PYRAMID) * 4
    counts = counter.get_flop_counts()['Global']
    assert counts[OP] == 2 * 4 * samples * 5
    assert counts[OP_BACKWARD] == 2 * counts[OP]
