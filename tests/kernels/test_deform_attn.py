"""deform_attn: sizes in tensors, odd locations, half types, FLOPs; tiles, slopes and limits.

What holds for every op is in test_ops.py.
"""

import pytest
import torch
from kernel_testing import error, with_gradients
from op_row import FP16, FP32
from ops import OPS, pyramid
from sampling import NAMES, PYRAMID, call, definition, fused, make
from torch.utils.flop_counter import FlopCounterMode

from ttt_kernels import deform_attn, deform_attn_fused

OP = torch.ops.ttt_kernels.deform_attn
OP_BACKWARD = torch.ops.ttt_kernels.deform_attn_backward
interpreter = pytest.mark.interpreter
BACKENDS = ('reference', pytest.param('triton', marks=interpreter))


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


# ------------------------------------------------------------------------- Triton's interpreter


@interpreter
@pytest.mark.parametrize('dtype', [FP32, FP16], ids=str)
@pytest.mark.parametrize('op', ['deform_attn', 'deform_attn fused'])
def test_the_tiles_of_a_gpu(op, dtype):
    case = pyramid(((3, 4), (2, 2)), queries=4, batch=1, heads=2, dim=32)
    OPS[op].check(case, dtype, 'triton', OPS[op].kernel_tolerance)


@interpreter
def test_sizes_beyond_the_values_count_as_zeros(several_programs):
    """The host does not read a tensor on a GPU; nothing outside of the values may be touched."""
    inputs = make(((3, 4), (2, 2)), 5, dtype=torch.float32)
    sizes = torch.tensor([[3, 4], [90, 70]])
    actual = with_gradients(lambda x: call(x, sizes, backend='triton'), inputs)
    inputs['attention_weights'][:, :, :, 1] = 0
    expected = call(inputs, ((3, 4), (2, 2)), backend='reference')
    assert error(actual[0], expected) < 1e-6
    assert actual[1]['value'][:, 12:].eq(0).all()


@interpreter
def test_the_slope_on_a_pixel_is_the_right_one(several_programs):
    value = torch.tensor([0.0, 1, 10, 100]).view(1, 4, 1, 1)
    # Centres of the four pixels, exactly.
    x = (torch.arange(4) + 0.5) / 4
    inputs = {
        'value': value,
        'sampling_locations': torch.stack((x, torch.full((4,), 0.5)), -1).view(1, 4, 1, 1, 1, 2),
        'attention_weights': torch.ones(1, 4, 1, 1, 1),
    }
    grad = torch.ones(1, 4, 1)
    for backend in ('triton', 'reference'):
        output, grads = with_gradients(
            lambda x, b=backend: call(x, ((1, 4),), backend=b), inputs, grad=grad
        )
        assert output.flatten().tolist() == [0, 1, 10, 100]
        assert grads['sampling_locations'][..., 0].flatten().tolist() == [4, 36, 360, -400]


@interpreter
@pytest.mark.parametrize('size', [50_000, 20_000])
def test_indices_beyond_32_bits_are_left_to_the_reference(size):
    from ttt_kernels.deform_attn import kernel

    value = torch.empty((1, size * size, 2, 16), device='meta')
    places, weights = torch.empty(1, 3, 2, 1, 4, 2), torch.empty(1, 3, 2, 1, 4)
    assert 'need 64-bit indices' in kernel.unsupported_reason(
        value, [size, size], None, None, places, weights
    )
