"""The inner steps on a GPU: kernels against fp64 references, autocast, compile, graphs."""

import math
import warnings

import pytest
import torch
from inner_steps import CASES
from kernel_testing import REHEARSING, assert_same, normal, some, with_gradients

from ttt_kernels import ttt_glu

pytestmark = pytest.mark.gpu
# Of the largest value, for 15 tokens or more: about twice the error of a PyTorch transcription that
# rounds the operands of the products as the kernels do, to 8, 11 or about 21 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5}
# Plain and hierarchical stages, odd maps, 224² to 1333×800.
SIZES = some((1, 1), (3, 5), (1, 7), (7, 9), (9, 13), (14, 14), (31, 33), (50, 84), (200, 334),
             rehearsed=2)  # fmt: skip
ODD = (5, 7) if REHEARSING else (31, 33)
LARGE = (9, 13) if REHEARSING else (50, 84)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def make(case, hw, dim, dtype, batch=2):
    return case.make(hw, dim, batch, dtype=dtype, device='cuda')


def check(case, inputs, hw, **options):
    tolerance = TOLERANCE[inputs['q'].dtype]
    if math.prod(hw) < 15:
        # Rounding errors do not average out over a few tokens.
        tolerance *= 4
    exact = {n: x.double() for n, x in inputs.items()}
    found = with_gradients(case.call, inputs, hw, backend='triton', **options)
    expected = with_gradients(case.call, exact, hw, backend='reference', **options)
    assert_same(found, expected, tolerance)


@pytest.mark.parametrize('dim', some(32, 64, 48))
@pytest.mark.parametrize('hw', SIZES)
def test_bf16_agrees_with_fp64(case, hw, dim):
    check(case, make(case, hw, dim, torch.bfloat16), hw)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32])
@pytest.mark.parametrize('hw', some((9, 13), (1, 1), LARGE))
def test_other_dtypes_agree_with_fp64(case, hw, dtype):
    if (case.name, dtype) == ('ttt_mlp', torch.float32):
        pytest.skip('ttt_mlp runs its reference in fp32')
    check(case, make(case, hw, 32, dtype), hw)


@pytest.mark.parametrize('dim', some(32, 64))
def test_the_other_option(case, dim):
    check(case, make(case, ODD, dim, torch.bfloat16), ODD, **case.other)


@pytest.mark.parametrize('batch', some(3, 1, 300))
def test_any_batch(case, batch):
    check(case, make(case, (14, 14), 32, torch.float16, batch), (14, 14))


@pytest.mark.parametrize('dim', some(5, 80))
def test_dwconv_takes_any_number_of_channels(dim):
    case = CASES['dwconv']
    check(case, make(case, (9, 13), dim, torch.bfloat16), (9, 13))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_a_detection_sized_map_does_not_underflow(case, dtype):
    hw = (20, 33) if REHEARSING else (200, 334)
    inputs = make(case, hw, 32, dtype, batch=1)
    _, g = case.op(*case.tensors(inputs), *case.rest(hw, 1 / 3, 'triton'))
    exact = {n: x.double() for n, x in inputs.items()}
    _, expected = case.op(*case.tensors(exact), *case.rest(hw, 1 / 3, 'reference'))
    # The gated model rounds the operands of its products to 11 or 8 bits.
    assert ((g - expected).norm() / expected.norm()).item() < (4e-4, 4e-3)[dtype == torch.bfloat16]


def test_the_same_bits_come_out_twice(case):
    inputs = make(case, LARGE, 32, torch.bfloat16)
    first = with_gradients(case.call, inputs, LARGE, backend='triton')
    for _ in range(5):
        again = with_gradients(case.call, inputs, LARGE, backend='triton')
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(first[1][n], x) for n, x in again[1].items())


def test_every_element_of_every_result_is_written(case):
    inputs = make(case, ODD, 32, torch.bfloat16)
    # torch then fills every torch.empty with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device='cuda').isnan().all()
        check(case, inputs, ODD)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('layout', ['reversed', 'expanded', 'far apart'])
def test_any_strides(case, layout):
    inputs = make(case, (3, 5), 32, torch.float16)
    expected = case.call(inputs, (3, 5), backend='triton')
    for name in 'qkv':
        x = inputs[name]
        if layout == 'reversed':
            turn = tuple(range(x.dim()))[::-1]
            x = x.permute(turn).contiguous().permute(turn)
        elif layout == 'expanded':
            x = x[:1].clone().expand_as(x)
        elif name == 'q':
            # Offsets beyond 2³¹, in 5 GB of which little is touched.
            step = 180_000_000
            base = torch.empty(15 * step, dtype=x.dtype, device='cuda')
            strides = (x[0, 0].numel(), step, *x[0, 0].contiguous().stride())
            x = base.as_strided(x.shape, strides).copy_(x)
        inputs[name] = x
    if layout == 'expanded':
        expected = expected[:1].expand_as(expected)
    torch.testing.assert_close(
        case.call(inputs, (3, 5), backend='triton'), expected, rtol=2e-3, atol=2e-3
    )


def test_a_gpu_takes_the_kernel_by_itself(case):
    inputs = make(case, (9, 13), 32, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        found = case.call(inputs, (9, 13), backend=None)
    assert torch.equal(found, case.call(inputs, (9, 13), backend='triton'))


def test_head_dims_without_a_kernel_fall_back_and_say_so():
    inputs = make(CASES['glu'], (3, 5), 72, torch.bfloat16)
    with pytest.raises(RuntimeError, match='d is 72; the kernels have at most 64'):
        CASES['glu'].call(inputs, (3, 5), backend='triton')
    with pytest.warns(RuntimeWarning, match='d is 72'):
        found = CASES['glu'].call(inputs, (3, 5), backend=None)
    assert torch.equal(found, CASES['glu'].call(inputs, (3, 5), backend='reference'))


def test_opcheck(case):
    hw = (3, 5)
    inputs = make(case, hw, 32, torch.float32)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    torch.library.opcheck(case.op.default, (*case.tensors(leaves), *case.rest(hw)))


def test_autocast(case):
    inputs = make(case, (9, 13), 32, torch.float32)
    with torch.autocast('cuda', dtype=torch.float16):
        found = case.call(inputs, (9, 13), backend=None)
    rounded = {n: x.half() if n in 'qkv' else x for n, x in inputs.items()}
    assert found.dtype == torch.float16
    assert torch.equal(found, case.call(rounded, (9, 13), backend='triton'))


def test_compiles_into_one_graph(case):
    inputs = make(case, (9, 13), 32, torch.bfloat16)
    compiled = torch.compile(case.call, fullgraph=True)
    found = with_gradients(compiled, inputs, (9, 13), backend='triton')
    assert_same(found, with_gradients(case.call, inputs, (9, 13), backend='triton'), 1e-6)


def test_a_cuda_graph_replays():
    inputs = make(CASES['glu'], (14, 14), 64, torch.bfloat16)
    ttt_glu(**inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ttt_glu(**inputs)
    inputs['q'].copy_(normal(torch.Generator().manual_seed(7), *inputs['q'].shape))
    graph.replay()
    torch.testing.assert_close(output, ttt_glu(**inputs), rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA GPUs')
def test_kernels_run_where_the_tensors_are(case):
    inputs = {n: x.to('cuda:1') for n, x in make(case, (9, 13), 32, torch.bfloat16).items()}
    check(case, inputs, (9, 13))
