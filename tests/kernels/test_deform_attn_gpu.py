"""deform_attn on a GPU: the adapter's shapes, sizes on the GPU, many points in one cell."""

import pytest
import torch
from kernel_testing import assert_same, with_gradients
from sampling import NAMES, PYRAMID, call, make

pytestmark = pytest.mark.gpu
# Half types: one rounding of each result.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
TYPES = (*TOLERANCE, torch.float32)
ADAPTER = {'extractor': (((50, 84),), 22_050), 'injector': (((100, 168), (50, 84), (25, 42)), 4200)}


def tolerance(dtype, shapes):
    """Largest allowed error, relative to the largest value of its kind.

    In fp32 it is the positions that count: of up to W pixels, rounded as product, as sum with the
    offset and less half a pixel, by W·2⁻²⁴ at most each. A value changes with them as it does from
    pixel to pixel, by about its own size. Sums, of the 64 corners of a query or of all that read a
    pixel, round like at most 128 terms of one sign. On a CPU the reference in fp32 is off by two
    fifths of this at most at the shapes of the adapter, and by a tenth at W = 33.
    """
    if dtype != torch.float32:
        return TOLERANCE[dtype]
    return (3 * max(map(max, shapes)) + 128) * 2.0**-24


def check(function, inputs, shapes):
    dtype = inputs['value'].dtype
    grad = grad_of(inputs)
    actual = with_gradients(lambda x: function(x, 'triton'), to_gpu(inputs), grad=grad)
    exact = to_gpu({n: x.double() for n, x in inputs.items()})
    expected = with_gradients(lambda x: function(x, 'reference'), exact, grad=grad)
    assert actual[0].dtype == dtype
    assert_same(actual, expected, tolerance(dtype, shapes))


def to_gpu(inputs):
    return {n: x.cuda() for n, x in inputs.items()}


def grad_of(inputs):
    """A gradient of the output that the type of the values holds exactly."""
    value, queries = inputs['value'], inputs['attention_weights'].shape[1]
    size = (value.shape[0], queries, value.shape[2] * value.shape[3])
    grad = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return grad.to(value.dtype).double().cuda()


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('part', ADAPTER)
def test_the_adapters_shapes(part, dtype):
    shapes, queries = ADAPTER[part]
    inputs = make(shapes, queries, dim=32, dtype=torch.float32)
    inputs['value'] = inputs['value'].to(dtype)
    # A location next to a cell's border may fall on its other side in fp32: hold it off.
    sizes = torch.tensor(shapes).flip(-1)[:, None]
    locations = inputs['sampling_locations']
    inputs['sampling_locations'] = ((locations * sizes).floor() + 0.125) / sizes
    check(lambda x, backend: call(x, shapes, backend=backend), inputs, shapes)


def test_sizes_on_the_gpu_are_those_in_numbers():
    inputs = to_gpu(make(dtype=torch.float32))
    sizes = torch.tensor(PYRAMID, device='cuda')
    grad = grad_of(inputs)
    expected = with_gradients(lambda x: call(x, backend='triton'), inputs, grad=grad)
    torch.cuda.set_sync_debug_mode('error')
    try:
        actual = with_gradients(lambda x: call(x, sizes, backend='triton'), inputs, grad=grad)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][n], expected[1][n]) for n in NAMES)


def test_everything_in_one_cell():
    inputs = make(((9, 9),), 500, dim=32, dtype=torch.float32)
    inputs['sampling_locations'] = torch.full_like(inputs['sampling_locations'], 0.47)
    shapes = ((9, 9),)
    check(lambda x, backend: call(x, shapes, backend=backend), inputs, shapes)
