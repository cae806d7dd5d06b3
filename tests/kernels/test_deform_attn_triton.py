"""The Triton kernels of deform_attn in Triton's interpreter: tiles, wrong sizes, slopes, limits.

What holds for every op is in test_ops_triton.py.
"""

import pytest
import torch
from kernel_testing import error, with_gradients
from op_row import FP16, FP32
from ops import OPS, pyramid
from sampling import call, make

interpreter = pytest.mark.interpreter


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
