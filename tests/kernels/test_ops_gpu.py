"""The Triton kernels of every op on a CUDA GPU, against the references in fp64: `make gpu`.

The ops are the rows of ops.py. Needs torch, Triton and pytest.
"""

import warnings
from collections.abc import Iterator

import pytest
import sampling
import torch
from kernel_testing import assert_same, error, with_gradients
from op_row import BF16, FP16, FP32, Case
from ops import OPS, STEPS, TTT_LINEAR, inner_gradient

pytestmark = pytest.mark.gpu
HW = (31, 33)
CASES = [
    # tools/dev/gpu_check.py reads the op's name.
    pytest.param(op, case, id=f'{op.name}-{name}-{i}')
    for name, op in OPS.items()
    for i, case in enumerate(op.gpu_cases)
]
every_op = pytest.mark.parametrize('op', OPS.values(), ids=OPS)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Has torch fill every fresh tensor with NaN: what is not written cannot go unseen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(op, hw=HW, backend='triton'):
    return lambda inputs: op.call(inputs, hw, backend=backend)


def make(op, dtype, **sizes):
    return op.make(HW, dim=32, dtype=dtype, device='cuda', **sizes)


@pytest.mark.parametrize('dtype', [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(('op', 'case'), CASES)
def test_output_and_every_gradient_agree_with_fp64(op, case, dtype):
    # Rounding errors do not average out over a few tokens.
    factor = 1 if case.hw[0] * case.hw[1] > 15 else 4
    tolerance = {t: factor * x for t, x in op.kernel_tolerance.items()}
    op.check(case, dtype, 'triton', tolerance, device='cuda')


@pytest.mark.parametrize('batch', [3, 1, 300])
@every_op
def test_any_batch(op, batch):
    case = Case((14, 14), {'batch': batch, 'dim': 32})
    op.check(case, FP16, 'triton', op.kernel_tolerance, device='cuda')


@every_op
def test_the_same_bits_come_out_again(op):
    inputs = make(op, BF16, batch=4)
    first = with_gradients(on_gpu(op), inputs)
    for _ in range(20):
        again = with_gradients(on_gpu(op), inputs)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(first[1][n], x) for n, x in again[1].items())


@pytest.mark.parametrize('layout', ['reversed', 'expanded', 'not aligned'])
@every_op
def test_any_layout(op, layout):
    inputs = make(op, FP16)
    on_gpu(op)(inputs)  # compiles for aligned tokens
    for name in op.tokens:
        x = inputs[name]
        turn = tuple(range(x.dim()))[::-1]
        inputs[name] = {
            'reversed': x.permute(turn).contiguous().permute(turn),
            'expanded': x[:1].expand_as(x),
            'not aligned': torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        }[layout]
    copies = {n: x.clone(memory_format=torch.contiguous_format) for n, x in inputs.items()}
    actual, expected = on_gpu(op)(inputs), on_gpu(op)(copies)
    # Rows that are not aligned are loaded and summed in another order.
    assert error(actual, expected) < op.kernel_tolerance[FP16]


@every_op
def test_a_gpu_takes_the_kernel_by_itself_under_autocast_too(op):
    inputs = make(op, FP32)
    rounded = {n: x.half() if n in op.tokens else x for n, x in inputs.items()}
    with warnings.catch_warnings(), torch.autocast('cuda', dtype=FP16):
        warnings.simplefilter('error')
        actual = on_gpu(op, backend=None)(inputs)
    assert actual.dtype == FP16
    assert torch.equal(actual, on_gpu(op)(rounded))


@every_op
def test_compiled_and_on_a_second_stream(op):
    # The ops share `on_gpu`, which torch would compile for eight of them only.
    torch.compiler.reset()
    inputs = make(op, BF16)
    expected = with_gradients(on_gpu(op), inputs)
    compiled = torch.compile(on_gpu(op), fullgraph=True, backend='aot_eager')
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = with_gradients(compiled, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(actual, expected, 1e-6)


@every_op
def test_a_cuda_graph_replays(op):
    inputs = make(op, BF16)
    on_gpu(op)(inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = on_gpu(op)(inputs)
    inputs[op.tokens[0]].mul_(0.5)
    graph.replay()
    torch.testing.assert_close(output, on_gpu(op)(inputs), rtol=0, atol=0)


@pytest.mark.parametrize('dtype', [FP16, BF16], ids=str)
@pytest.mark.parametrize('op', STEPS.values(), ids=STEPS)
def test_a_detection_sized_map_does_not_underflow_in_an_inner_step(op, dtype):
    hw = (200, 334)
    inputs = op.make(hw, dim=32, batch=1, dtype=dtype, device='cuda')
    g = inner_gradient(op, inputs, hw, 'triton')
    expected = inner_gradient(op, {n: x.double() for n, x in inputs.items()}, hw, 'reference')
    # The gated model rounds the operands of its products to 11 or 8 bits.
    assert ((g - expected).norm() / expected.norm()).item() < (4e-4, 4e-3)[dtype == BF16]


@pytest.mark.parametrize('segment', [32, 3])
def test_the_state_walks_back_over_a_long_sequence(segment, cut):
    # 1000 chunks; the fp64 reference on the GPU, where it is quick.
    cut(segment)
    inputs = TTT_LINEAR.make((1, 16_000), batch=1, heads=1, dim=64, dtype=BF16, device='cuda')
    exact = {n: x.double() for n, x in inputs.items()}
    expected = with_gradients(on_gpu(TTT_LINEAR, backend='reference'), exact)
    assert_same(with_gradients(on_gpu(TTT_LINEAR), inputs), expected, 5e-2)


def test_sizes_of_levels_on_the_gpu_are_those_in_numbers():
    op, shapes = OPS['deform_attn'], sampling.PYRAMID
    inputs = op.make(HW, shapes, dtype=FP32, device='cuda')
    sizes = torch.tensor(shapes, device='cuda')
    grad = torch.ones_like(op.call(inputs, HW, shapes=shapes, backend='triton'))
    results = []
    torch.cuda.set_sync_debug_mode('error')
    try:
        for given in (shapes, sizes):
            options = {'shapes': given, 'backend': 'triton'}
            results.append(with_gradients(op.call, inputs, HW, grad=grad, **options))
    finally:
        torch.cuda.set_sync_debug_mode('default')
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_memory_is_linear_in_the_tokens():
    call, peaks = on_gpu(TTT_LINEAR), []
    for tokens in (2048, 4096):
        inputs = TTT_LINEAR.make((1, tokens), dim=64, heads=6, dtype=BF16, device='cuda')
        leaves = {n: x.requires_grad_() for n, x in inputs.items()}
        call(leaves).float().square().mean().backward()
        for x in leaves.values():
            x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = call(leaves)
        kept = torch.cuda.memory_allocated() - before
        output.backward(torch.ones_like(output))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        token_sized = output.numel() * output.element_size()
        # O and G, and a quarter of a token-sized tensor of states.
        assert kept < 2.5 * token_sized
    assert peaks[1] < 2.2 * peaks[0]
