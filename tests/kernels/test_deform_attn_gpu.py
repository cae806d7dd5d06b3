"""deform_attn on a GPU: kernels against the fp64 reference, types, determinism, graphs."""

import pytest
import torch
from kernel_testing import REHEARSING, assert_same, some, with_gradients
from sampling import NAMES, PYRAMID, call, call_fused, fused, make

pytestmark = pytest.mark.gpu
# Half types: one rounding of each result.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
TYPES = (*TOLERANCE, torch.float32)
ADAPTER = {'extractor': (((50, 84),), 22_050), 'injector': (((100, 168), (50, 84), (25, 42)), 4200)}
if REHEARSING:
    ADAPTER = {'extractor': (((4, 5),), 70), 'injector': (((8, 10), (4, 5), (2, 3)), 20)}


def tolerance(dtype, shapes):
    """How far off a result may be, relative to the largest of its kind.

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
    found = with_gradients(lambda x: function(x, 'triton'), to_gpu(inputs), grad=grad)
    exact = to_gpu({n: x.double() for n, x in inputs.items()})
    expected = with_gradients(lambda x: function(x, 'reference'), exact, grad=grad)
    assert found[0].dtype == dtype
    assert_same(found, expected, tolerance(dtype, shapes))


def to_gpu(inputs):
    return {n: x.cuda() for n, x in inputs.items()}


def grad_of(inputs):
    """A gradient of the output that the type of the values holds exactly."""
    value, queries = inputs['value'], list(inputs.values())[-1].shape[1]
    size = (value.shape[0], queries, value.shape[2] * value.shape[3])
    grad = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return grad.to(value.dtype).double().cuda()


SHAPES = (PYRAMID, ((1, 1),), ((31, 33), (16, 17)))
# Every size of a head, then every shape and type: each is some kernels to compile.
VARIANTS = [(PYRAMID, dim, torch.bfloat16) for dim in (24, 16, 64, 128)]
VARIANTS += [(shapes, 32, dtype) for shapes in SHAPES for dtype in TYPES]


@pytest.mark.parametrize(('shapes', 'dim', 'dtype'), some(*VARIANTS, rehearsed=2))
def test_every_gradient_agrees_with_fp64(shapes, dim, dtype):
    inputs = make(shapes, 63, dim=dim, dtype=torch.float32)
    inputs['value'] = inputs['value'].to(dtype)
    check(lambda x, backend: call(x, shapes, backend=backend), inputs, shapes)


@pytest.mark.parametrize('dtype', some(*TYPES))
@pytest.mark.parametrize('part', ADAPTER)
def test_fused_at_the_adapters_shapes(part, dtype):
    shapes, queries = ADAPTER[part]
    inputs = fused(make(shapes, queries, dim=32, dtype=torch.float32), shapes)
    for name in ('value', 'sampling_offsets', 'attention_logits'):
        inputs[name] = inputs[name].to(dtype)
    # A location next to a cell's border may fall on its other side in fp32: hold it off.
    offsets = inputs['sampling_offsets']
    inputs['sampling_offsets'] = offsets.float().mul(4).round().div(4).to(dtype)
    sizes = torch.tensor(shapes).flip(-1)
    centres = inputs['reference_points']
    inputs['reference_points'] = ((centres * sizes).floor() + 0.125) / sizes
    check(lambda x, backend: call_fused(x, shapes, backend=backend), inputs, shapes)


def test_sizes_on_the_gpu_are_those_in_numbers():
    inputs = to_gpu(make(dtype=torch.float32))
    sizes = torch.tensor(PYRAMID, device='cuda')
    grad = grad_of(inputs)
    expected = with_gradients(lambda x: call(x, backend='triton'), inputs, grad=grad)
    torch.cuda.set_sync_debug_mode('error')
    try:
        found = with_gradients(lambda x: call(x, sizes, backend='triton'), inputs, grad=grad)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][n], expected[1][n]) for n in NAMES)


@pytest.mark.parametrize('part', ADAPTER)
def test_the_same_bits_come_out_twice(part):
    shapes, queries = ADAPTER[part]
    inputs = to_gpu(make(shapes, queries, dim=32, dtype=torch.float32))
    inputs['value'] = inputs['value'].bfloat16()
    grad = grad_of(inputs)
    first = with_gradients(lambda x: call(x, shapes, backend='triton'), inputs, grad=grad)
    for _ in range(5):
        again = with_gradients(lambda x: call(x, shapes, backend='triton'), inputs, grad=grad)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(first[1][n], x) for n, x in again[1].items())


def test_everything_in_one_cell():
    inputs = make(((9, 9),), 500, dim=32, dtype=torch.float32)
    inputs['sampling_locations'] = torch.full_like(inputs['sampling_locations'], 0.47)
    shapes = ((9, 9),)
    check(lambda x, backend: call(x, shapes, backend=backend), inputs, shapes)


def test_a_gpu_takes_the_kernel_by_itself(recwarn):
    inputs = to_gpu(make(dtype=torch.float32))
    assert torch.equal(call(inputs), call(inputs, backend='triton'))
    assert not recwarn.list


def test_compiles_into_one_graph():
    inputs = to_gpu(fused(make(dtype=torch.float32)))
    compiled = torch.compile(call_fused, fullgraph=True)
    grad = grad_of(inputs)
    found = with_gradients(compiled, inputs, grad=grad)
    expected = with_gradients(call_fused, inputs, grad=grad)
    assert_same(found, expected, 1e-6)


def test_a_cuda_graph_replays():
    inputs = to_gpu(make(dtype=torch.float32))
    call(inputs)  # compiles, and copies the sizes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(inputs)
    inputs['value'].mul_(2)
    graph.replay()
    torch.testing.assert_close(output, call(inputs), rtol=0, atol=0)
