"""The Triton kernels of ttt_linear on a CUDA GPU, against the fp64 reference: `make gpu`.

Needs torch, Triton and pytest. What the interpreter cannot show is here: layouts, races, the GPU's
rounding, and both ways of writing the output.
"""

import pytest
import torch
from kernel_testing import assert_same, error, with_gradients
from scans import NAMES, call, make

pytestmark = pytest.mark.gpu
TOKENS = (17, 1, 15, 16, 52, 63, 64, 196, 1000)
# Relative to the largest value: a few units of 2⁻⁸ and 2⁻¹¹, through a chain of chunks. In fp32 a
# product is three in tf32, which keep some 21 bits, and LayerNorms amplify what is lost.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 5e-4}


@pytest.fixture(autouse=True)
def poison():
    """Has torch fill every fresh tensor with NaN: what is not written cannot go unseen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(inputs, ways='fb', **options):
    return call(inputs, ways, backend='triton', **options)


def cuda(inputs):
    return {n: x if x is None else x.cuda() for n, x in inputs.items()}


def check(found, expected, tolerance):
    """`assert_same`, but the gradient of token_scale is a small difference of large numbers."""
    grads, expected_grads = dict(found[1]), dict(expected[1])
    if 'token_scale' in grads:
        off = error(grads.pop('token_scale'), expected_grads.pop('token_scale'))
        assert off < 2 * tolerance
    assert_same((found[0], grads), (expected[0], expected_grads), tolerance)


@pytest.mark.parametrize('segment', [0, 3])
@pytest.mark.parametrize('dim', [32, 64])
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_every_gradient_at_every_length(dtype, dim, segment, cut):
    cut(segment)
    for tokens in TOKENS:
        inputs = make(tokens, dim=dim, heads=3, dtype=dtype)
        exact = {n: x.double() for n, x in inputs.items()}
        expected = with_gradients(lambda x: call(x, backend='reference'), exact)
        actual = with_gradients(on_gpu, cuda(inputs))
        assert actual[0].dtype == dtype
        assert not actual[0].isnan().any(), tokens
        check(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize('segment', [0, 4])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_a_hundred_times_the_same_bits(dtype, segment, cut):
    cut(segment)
    inputs = cuda(make(500, batch=4, dim=64, heads=6, dtype=dtype))
    output, grads = with_gradients(on_gpu, inputs)
    for _ in range(99):
        again, grads_again = with_gradients(on_gpu, inputs)
        assert torch.equal(output, again)
        assert all(torch.equal(grads[n], grads_again[n]) for n in NAMES)


@pytest.mark.parametrize('ways', ['bfb', 'f', 'b'])
def test_directions_without_token_scale(ways, cut):
    cut(2)
    inputs = make(70, ways, dim=64, dtype=torch.bfloat16)
    inputs['token_scale'] = None
    exact = {n: x if x is None else x.double() for n, x in inputs.items()}
    expected = with_gradients(lambda x: call(x, ways, backend='reference'), exact)
    actual = with_gradients(lambda x: on_gpu(x, ways), cuda(inputs))
    assert_same(actual, expected, TOLERANCE[torch.bfloat16])


def test_the_state_walks_back_over_a_long_sequence():
    # 1000 chunks; the fp64 reference on the GPU, where it is quick.
    inputs = cuda(make(16000, batch=1, heads=1, dim=64, dtype=torch.bfloat16))
    exact = {n: x.double() for n, x in inputs.items()}
    expected = with_gradients(lambda x: call(x, backend='reference'), exact)
    assert_same(with_gradients(on_gpu, inputs), expected, 5e-2)


def test_memory_is_linear_in_the_tokens():
    peaks = []
    for tokens in (2048, 4096):
        inputs = cuda(make(tokens, batch=2, dim=64, heads=6, dtype=torch.bfloat16))
        leaves = {n: x.requires_grad_() for n, x in inputs.items()}
        on_gpu(leaves).float().square().mean().backward()
        for x in leaves.values():
            x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = on_gpu(leaves)
        kept = torch.cuda.memory_allocated() - before
        output.backward(torch.ones_like(output))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        token_sized = output.numel() * output.element_size()
        # O and G, and a quarter of a token-sized tensor of states.
        assert kept < 2.5 * token_sized
    assert peaks[1] < 2.2 * peaks[0]
