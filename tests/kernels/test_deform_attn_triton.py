"""The Triton kernels of deform_attn in Triton's interpreter, against the reference.

The interpreter knows neither races nor layouts, and its bf16 is wrong: fp64, fp32 and fp16 it is.
"""

import pytest
import torch
from kernel_testing import error, with_gradients
from sampling import NAMES, call, make

inside = pytest.mark.interpreter
# The two sides differ by the order of their sums.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture
def large_tiles(monkeypatch):
    """The interpreter takes its time for each program, whatever is in it."""
    from ttt_kernels.deform_attn import kernel

    def config(name, dtype, dim):
        channels = 1 << (dim - 1).bit_length()
        if name == 'backward_value':
            return {'CHANNELS': channels, 'PIXELS': 32, 'POINTS': 8, 'num_warps': 4}
        return {'CHANNELS': channels, 'ROWS': 64, 'num_warps': 4}

    monkeypatch.setattr(kernel, 'config', config)


@inside
def test_sizes_in_a_tensor_are_those_in_numbers(large_tiles):
    shapes = ((3, 4), (1, 2))
    inputs = make(shapes, 5, batch=1, points=2, dtype=torch.float32)
    expected = with_gradients(lambda x: call(x, shapes, backend='triton'), inputs)
    sizes = torch.tensor(shapes, dtype=torch.int32)
    found = with_gradients(lambda x: call(x, sizes, backend='triton'), inputs)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][n], expected[1][n]) for n in NAMES)


@inside
def test_sizes_beyond_the_values_count_as_zeros(large_tiles):
    """The host does not read a tensor on a GPU; nothing outside of the values may be touched."""
    inputs = make(((3, 4), (2, 2)), 5, dtype=torch.float32)
    sizes = torch.tensor([[3, 4], [90, 70]])
    found = with_gradients(lambda x: call(x, sizes, backend='triton'), inputs)
    inputs['attention_weights'][:, :, :, 1] = 0
    expected = call(inputs, ((3, 4), (2, 2)), backend='reference')
    assert error(found[0], expected) < 1e-6
    assert found[1]['value'][:, 12:].eq(0).all()


@inside
def test_locations_that_are_no_places(large_tiles):
    shapes = ((3, 4),)
    inputs = make(shapes, batch=1, points=2, dtype=torch.float32)
    expected = call(inputs, shapes, backend='triton')
    inputs['sampling_locations'][0, 3, 1, 0, 0] = torch.tensor([float('nan'), 0.5])
    inputs['sampling_locations'][0, 4, 1] = float('inf')
    inputs['sampling_locations'][0, 5, 1] = -1e38
    output, grads = with_gradients(lambda x: call(x, shapes, backend='triton'), inputs)
    assert output.isnan()[0, 3, 5:10].all()
    # Infinitely far outside is outside: zeros.
    assert output[0, 4:6, 5:10].eq(0).all()
    others = torch.ones(1, 9, 15, dtype=torch.bool)
    others[0, 3:6] = False
    assert torch.equal(output[others], expected[others])
    assert grads['value'].isfinite().all()


@inside
def test_the_slope_on_a_pixel_is_the_right_one(large_tiles):
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


@inside
@pytest.mark.parametrize('size', [50_000, 20_000])
def test_indices_beyond_32_bits_are_left_to_the_reference(size):
    from ttt_kernels.deform_attn import kernel

    value = torch.empty((1, size * size, 2, 16), device='meta')
    places, weights = torch.empty(1, 3, 2, 1, 4, 2), torch.empty(1, 3, 2, 1, 4)
    assert 'need 64-bit indices' in kernel.supported(
        value, [size, size], None, None, places, weights
    )
