"""deform_attn on a GPU: the adapter's shapes, sizes on the GPU, many points in one cell."""

import pytest
import torch
from kernel_testing import assert_same, with_gradients
from sampling import PYRAMID, call, make

pytestmark = pytest.mark.gpu
# Half types: one rounding of each result.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {'extractor': (((50, 84),), 22_050), 'injector': (((100, 168), (50, 84), (25, 42)), 4200)}


def tolerance(dtype, shapes):
    """Largest allowed error, relative to the largest value of its kind.

    In fp32 it is the positions that count: of up to W pixels, rounded as product and less half a
    pixel, by W·2⁻²⁴ at most each. A value changes with them as it does from pixel to pixel, by
    about its own size. Sums, of the 64 corners of a query or of all that read a pixel, round like
    at most 128 terms of one sign.
    """
    return TOLERANCE.get(dtype, (3 * max(map(max, shapes)) + 128) * 2.0**-24)


def on_gpu(inputs, sizes, backend='triton'):
    """Output and gradients, for a gradient of the output that every dtype holds exactly."""
    inputs = {n: x.cuda() for n, x in inputs.items()}
    output = call(inputs, sizes, backend=backend)
    grad = torch.randint(-8, 9, output.shape, generator=torch.Generator().manual_seed(1))
    return with_gradients(call, inputs, sizes, grad=grad.double().cuda(), backend=backend)


def check(inputs, shapes):
    exact = {n: x.double() for n, x in inputs.items()}
    expected = on_gpu(exact, shapes, 'reference')
    assert_same(on_gpu(inputs, shapes), expected, tolerance(inputs['value'].dtype, shapes))


@pytest.mark.parametrize('dtype', [*TOLERANCE, torch.float32])
@pytest.mark.parametrize('part', SHAPES)
def test_the_adapters_shapes(part, dtype):
    shapes, queries = SHAPES[part]
    inputs = make(shapes, queries, dim=32, dtype=torch.float32)
    inputs['value'] = inputs['value'].to(dtype)
    # A location next to a cell's border may fall on its other side in fp32: hold it off.
    sizes = torch.tensor(shapes).flip(-1)[:, None]
    locations = inputs['sampling_locations']
    inputs['sampling_locations'] = ((locations * sizes).floor() + 0.125) / sizes
    check(inputs, shapes)


def test_sizes_on_the_gpu_are_those_in_numbers():
    inputs = {n: x.cuda() for n, x in make(dtype=torch.float32).items()}
    sizes, options = torch.tensor(PYRAMID, device='cuda'), {'backend': 'triton'}
    options['grad'] = torch.ones_like(call(inputs, PYRAMID, backend='triton'))
    expected = with_gradients(call, inputs, PYRAMID, **options)
    torch.cuda.set_sync_debug_mode('error')
    try:
        actual = with_gradients(call, inputs, sizes, **options)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][n], x) for n, x in expected[1].items())
