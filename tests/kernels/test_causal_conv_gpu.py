"""causal_conv on a GPU: kernels against the fp64 definition, types, determinism, graphs."""

import pytest
import torch
from convolutions import call, make, primal
from kernel_testing import assert_same, some, with_gradients

pytestmark = pytest.mark.gpu
# One rounding of each result; in fp32 sums over the tokens.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# Tokens, scans, weights, channels, taps.
SIZES = some(
    (37, 'fb', 2, 70, 4), (1, 'b', 1, 16, 4), (2, 'bf', 2, 5, 8), (196, 'f', 1, 192, 3),
    (4200, 'fb', 2, 384, 4), rehearsed=2,
)  # fmt: skip


def there(*size, dtype):
    tokens, ways, weights, channels, taps = size
    sizes = {'weights': weights, 'channels': channels, 'taps': taps}
    return make(tokens, ways, **sizes, dtype=dtype, device='cuda')


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('size', SIZES, ids=str)
def test_output_and_every_gradient_agree_with_fp64(size, dtype):
    inputs = there(*size, dtype=dtype)
    exact = {n: x.double() for n, x in inputs.items()}
    found = with_gradients(call, inputs, size[1], 'triton')
    assert_same(found, with_gradients(primal, exact, size[1]), TOLERANCE[dtype])


def test_the_same_bits_twice_and_nothing_unwritten():
    inputs = there(*SIZES[-1], dtype=torch.bfloat16)
    ways = SIZES[-1][1]
    first = with_gradients(call, inputs, ways, 'triton')
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        again = with_gradients(call, inputs, ways, 'triton')
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(first[1][n], g) for n, g in again[1].items())


def test_what_a_gpu_does_by_default_and_in_a_graph():
    inputs = there(*SIZES[0], dtype=torch.bfloat16)
    expected = call(inputs, 'fb', 'triton')
    assert torch.equal(call(inputs, 'fb', None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(inputs, 'fb', None)
    inputs['x'].copy_(inputs['x'].flip(0))
    graph.replay()
    torch.testing.assert_close(output, call(inputs, 'fb', None), rtol=0, atol=0)
