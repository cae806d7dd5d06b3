"""The Triton kernels in Triton's interpreter: every op against its definition, and each by itself.

The interpreter knows neither races nor layouts nor the GPU's rounding, and its bf16 is wrong: fp64,
fp32 and fp16 it is. The ops are the rows of ops.py; test_*_gpu.py have the rest.
"""

import importlib
from types import SimpleNamespace

import emulation
import pytest
import sampling
import torch
import triton
import triton.language as tl
from kernel_testing import assert_same, error, normal, opcheck, with_gradients
from op_row import FP16, FP32, FP64, Case
from ops import OPS, STEPS, inner_gradient, pyramid, scan
from scans import OP, OP_BACKWARD, call, make

from ttt_kernels import _check, _compare, _launch, _op
from ttt_kernels.ttt_linear import _backward_kernels, kernel
from ttt_kernels.ttt_linear._backward_kernels import add_rows
from ttt_kernels.ttt_linear._tiles import dense_scan_of, scan_of, tile_pointers

pytestmark = pytest.mark.interpreter
several_programs = pytest.mark.usefixtures('several_programs')
HW = (3, 5)
every_op = pytest.mark.parametrize('op', OPS.values(), ids=OPS)


def on_triton(op):
    return lambda inputs, hw=HW, **options: op.call(inputs, hw, backend='triton', **options)


@several_programs
@pytest.mark.parametrize('name', sorted(OPS.keys() - {'ttt_linear', 'deform_attn'}))
def test_offsets_beyond_32_bits(name, monkeypatch):
    """5 GB of address space, of which a few pages are touched.

    deform_attn copies such values, ttt_linear refuses them.
    """
    op = OPS[name]
    inputs = op.make(HW, dim=32, dtype=FP16)
    dense = dict(inputs)
    monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', False)
    for n in op.tokens:
        x, step = inputs[n], 180_000_000
        strides = (x[0, 0].numel(), step, *x[0, 0].contiguous().stride())
        inputs[n] = torch.empty(15 * step, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)
    assert torch.equal(on_triton(op)(inputs), on_triton(op)(dense))


@several_programs
@every_op
def test_opcheck(op):
    checks = ('test_schema', 'test_autograd_registration', 'test_faketensor')
    case = Case(HW, {'dim': 32, 'batch': 1, 'heads': 1})
    opcheck(op, 'triton', case, FP32, test_utils=checks)


@several_programs
@pytest.mark.parametrize(
    ('op', 'case', 'message'),
    [pytest.param(o, c, m, id=f'{n}: {m}') for n, o in OPS.items() for m, c in o.refused.items()],
)
def test_what_the_kernels_cannot_run_is_named(op, case, message):
    inputs = op.make(case.hw, dtype=FP32, **case.sizes)
    with pytest.raises(RuntimeError, match=message):
        on_triton(op)(inputs, case.hw, **case.options)
    if inputs[op.tokens[0]].numel():
        # By default another implementation runs.
        assert op.call(inputs, case.hw, backend=None, **case.options).isfinite().all()


# --------------------------------------------------------------------------------------- ttt_linear


# Relative to the largest value. The two sides add up in another order; in half precision they also
# round the operands at other places: a few units of 2⁻¹¹, through a chain of chunks.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.fixture(params=[False, True], ids=['', 'apart'])
def output_apart(request, monkeypatch):
    """Has the output computed by the scan, and by a kernel of its own."""
    from ttt_kernels.ttt_linear import kernel

    monkeypatch.setattr(kernel, 'output_apart', lambda *_: request.param)


# One segment of one mini-batch, of several, a ragged last one; mini-batches of fewer tokens.
@pytest.mark.parametrize(
    ('tokens', 'size', 'segment'),
    [
        *((1, 16, 1), (16, 16, 2), (17, 16, 1), (52, 16, 2), (100, 16, 3)),
        *((20, 8, 1), (3, 1, 32), (40, 12, 2)),
    ],
)
def test_scan_in_segments_and_every_gradient(tokens, size, segment, output_apart, cut):
    cut(segment)
    case = scan(tokens, size=size, batch=1, heads=1, dim=64 if tokens % 2 else 32)
    OPS['ttt_linear'].check(case, FP64, 'triton', TOLERANCE)


@pytest.mark.parametrize(('size', 'tokens'), [(4, 10), (16, 5)])
def test_what_fills_up_a_chunk_is_no_nan_without_eps(size, tokens, cut):
    cut(3)
    # One image, one head: their own tokens have a variance.
    inputs = make(tokens, size=size, batch=1, heads=1, dim=32, dtype=FP32)
    inputs['b0'] = torch.zeros_like(inputs['b0'])
    exact, options = {n: x.double() for n, x in inputs.items()}, {'size': size, 'eps': 0.0}
    actual = with_gradients(call, inputs, backend='triton', **options)
    assert_same(actual, with_gradients(call, exact, **options), TOLERANCE[FP32])


def test_bf16_is_left_to_a_gpu():
    with pytest.raises(RuntimeError, match='bfloat16'):
        call(make(2, dim=32, dtype=torch.bfloat16), backend='triton')


def test_a_nan_is_seen_in_half_precision(cut):
    cut(3)
    inputs = make(20, 'f', batch=1, heads=1, dim=32, dtype=torch.float16)
    inputs['v'] = inputs['v'].clone()
    inputs['v'][0, 3, 0, 0, 5] = torch.nan
    # In its mini-batch, whose products it is in, and in all that follow: as in the reference.
    for backend in ('triton', 'reference'):
        assert call(inputs, 'f', backend=backend).isnan().all()


def test_what_is_kept_may_exceed_half_precision():
    inputs = make(20, 'f', batch=1, heads=1, dim=32, dtype=FP16)
    inputs |= {'k': 100 * inputs['k'], 'w0': 10_000 * inputs['w0']}
    actual, expected = (OP(*inputs.values(), 'f', 16, 1e-6, w)[1] for w in ('triton', 'reference'))
    assert torch.finfo(FP16).max < expected.abs().max() < torch.inf
    assert error(actual, expected) < TOLERANCE[FP16]


@pytest.mark.parametrize(
    ('segment', 'size', 'dtype'),
    [(2, 16, FP64), (1, 12, FP64), (3, 16, FP32), (3, 16, FP16)],
    ids=str,
)
def test_one_backend_follows_the_other(segment, size, dtype, output_apart, cut):
    cut(segment)
    # 20 channels: the kernels fill them up to 32.
    inputs = make(37, size=size, batch=1, heads=1, dim=20, dtype=dtype)
    options, tolerance = ('fb', size, 1e-6), TOLERANCE[dtype]
    results = {way: OP(*inputs.values(), *options, way) for way in ('triton', 'reference')}
    for name, x, y in zip(('o', 'z', 'w', 'c'), *results.values(), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert error(x, y) < tolerance, name
    o, *nothing = OP(*inputs.values(), *options, 'triton', False)
    assert torch.equal(o, results['triton'][0])
    assert not any(x.numel() for x in nothing)
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = {n: x.double() for n, x in inputs.items()}
    _, expected = with_gradients(lambda x: call(x, size=size), exact, grad=grad)
    for first, then in (('triton', 'reference'), ('reference', 'triton')):
        # Rounding gives Z and the states a mean over the features, which LayerNorm ignores.
        kept = [x + 0.1 * (dtype == FP64) for x in results[first][1:]]
        actual = OP_BACKWARD(grad, *inputs.values(), *kept, *options, then)
        for (name, y), x in zip(expected.items(), actual, strict=True):
            assert error(x, y) < tolerance, name


@pytest.mark.parametrize('size', [0.1, 1, 100])
def test_the_emulation_computes_what_the_kernels_do(size, cut):
    """In fp32; test_ttt_linear.py has bf16."""
    cut(3)
    inputs = make(105, 'fb', batch=1, heads=1, dim=32, dtype=FP32)
    inputs |= {n: size * inputs[n] for n in 'qkv'}
    args = _op.OPS['ttt_linear'].arguments(*inputs.values(), 'fb', 16, 1e-6)
    grad = normal(torch.Generator().manual_seed(1), *args.q.shape).float()
    module = importlib.import_module('ttt_kernels.ttt_linear.kernel')
    outputs, grads = [], []
    for way in (module, emulation):
        outputs.append(way.forward(args))
        grads.append(way.backward([grad], args, outputs[0][1:]))
    # Sums in another order, through seven mini-batches.
    for x, y in zip((*outputs[0], *grads[0]), (*outputs[1], *grads[1]), strict=True):
        assert x.shape == y.shape
        assert error(x, y) < 4e-6


def test_a_token_too_far_from_the_next_is_named():
    from ttt_kernels.ttt_linear import kernel

    inputs = make(2, dim=32, dtype=torch.float32)
    far = torch.empty((2**27 + 64) // 32, 1, 2, 2, 32, device='meta')
    far = far.as_strided((2, 2, 2, 2, 32), (1, 2**27, 64, 32, 1))
    reason = kernel.unsupported_reason(SimpleNamespace(**inputs | {'k': far}, mini_batch_size=16))
    assert 'k has 134217728 elements from token to token' in reason


@pytest.mark.parametrize(
    ('dim', 'dtype', 'little'),
    [(72, FP32, True), (72, FP32, False), (72, FP16, True), (64, FP32, True)],
)
def test_heads_that_do_not_fit_in_shared_memory(dim, dtype, little, monkeypatch):
    from ttt_kernels.ttt_linear import kernel

    monkeypatch.setattr(_launch, 'gpu', lambda *_: _launch.Gpu(little=little))
    reason = kernel.unsupported_reason(
        SimpleNamespace(**make(2, dim=dim, dtype=dtype), mini_batch_size=16)
    )
    assert (reason is not None) is ((dim, dtype, little) == (72, FP32, True))


@triton.jit
def write_offsets(
    out, scan, T, R, H, reverse_mask, b, t, r, h, n, SIZE: tl.constexpr, DENSE: tl.constexpr
):
    D: tl.constexpr = 64
    start, step = scan_of(0, (b, t, r, h), scan, T, R, H, reverse_mask)
    if DENSE:
        start, step = dense_scan_of(0, D, scan, T, R, H, reverse_mask)
    tile = tl.arange(0, 16)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + tile, tile_pointers(start, step, n, D, SIZE))


@pytest.mark.parametrize('dense', [True, False])
@pytest.mark.parametrize('last', [True, False])
@pytest.mark.parametrize('size', [16, 12])
def test_offsets_do_not_overflow(last, dense, size):
    batch, tokens, scans, heads, dim = 9, 2**21 + 5, 2, 12, 64
    b, t, r, h = tokens * scans * heads * dim, scans * heads * dim, heads * dim, dim
    if not dense:
        # A view into a packed projection.
        b, t = 3 * b, 3 * t
    assert batch * b > 2**34
    scan = batch * scans * heads - 1 if last else 0
    image, way, head = scan // (scans * heads), scan // heads % scans, scan % heads
    chunk = triton.cdiv(tokens, size) - 1
    out = torch.empty(16, dim, dtype=torch.int64)
    where = (scan, tokens, scans, heads, 0b10, b, t, r, h, chunk)
    write_offsets[(1,)](out, *where, SIZE=size, DENSE=dense)
    places = chunk * size + torch.arange(16)
    # The second scan runs backward.
    places = tokens - 1 - places if way else places
    rows = image * b + places * t + way * r + head * h
    assert torch.equal(out, rows[:, None] + torch.arange(dim))


# ---------------------------------------------------------------------------------- the inner steps


every_step = pytest.mark.parametrize('op', STEPS.values(), ids=STEPS)


@pytest.mark.parametrize(
    ('backend', 'zero'),
    [('reference', 'q'), ('reference', 'k'), ('reference', 'v'), ('triton', 'k'), ('triton', 'v')],
)
@every_step
def test_a_zero_gradient_has_a_derivative(op, backend, zero):
    # ‖g‖ = 0 for k = 0 or v = 0: the damping is the identity there, and nothing is divided by 0.
    inputs = op.make((3, 3), dim=16)
    inputs[zero] = torch.zeros_like(inputs[zero])
    expected = with_gradients(op.definition, inputs, hw=(3, 3))
    assert all(g.isfinite().all() for g in expected[1].values())
    assert_same(with_gradients(op.call, inputs, (3, 3), backend=backend), expected, 1e-12)


@every_step
def test_one_program_takes_a_whole_sum(op, monkeypatch):
    monkeypatch.setattr(_launch, '_ENOUGH', 1)
    op.check(Case((3, 40), {'dim': 32, 'batch': 1}), torch.float64, 'triton', op.kernel_tolerance)


@every_step
def test_small_values_do_not_underflow_in_half_precision(op, several_programs):
    # v/N would be around 1e-6, of which fp16 keeps four bits, as that of a map of 66 800 tokens.
    hw = (20, 30)
    inputs = op.make(hw, dim=32, batch=1, dtype=torch.float16)
    inputs['v'] = inputs['v'] * 2**-10
    g = inner_gradient(op, inputs, hw, 'triton')
    exact = {n: x.double() for n, x in inputs.items()}
    expected = inner_gradient(op, exact, hw, 'reference')
    # The gated model rounds the operands of its products to 11 bits.
    assert ((g - expected).norm() / expected.norm()).item() < 2e-3


@every_step
def test_small_gradients_keep_their_bits_in_half_precision(op, several_programs):
    # dO near the least normal number of fp16: its mean products over the tokens lie far below.
    hw = (14, 14)
    inputs = op.make(hw, dim=32, batch=1, dtype=torch.float16)
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    exact = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    grad = normal(torch.Generator().manual_seed(1), *inputs['q'].shape)
    grad = (grad.abs() * 2**-13).half()
    names = [n for n in inputs if n.startswith('w')]
    actual, expected = (
        torch.autograd.grad(
            op.call(x, hw, backend=backend), [x[n] for n in names], grad.to(x['q'].dtype)
        )
        for x, backend in ((inputs, 'triton'), (exact, 'reference'))
    )
    for name, x, y in zip(names, actual, expected, strict=True):
        assert ((x - y).norm() / y.norm()).item() < 5e-3, name


@pytest.mark.parametrize(('tokens', 'sums'), [(1, 1), (17, 3), (196, 768), (66_800, 3), (6400, 0)])
def test_every_token_has_one_program(tokens, sums):
    splits, span = _launch.split(tokens, sums, 32)
    assert span % 32 == 0
    assert (splits - 1) * span < tokens <= splits * span


@pytest.mark.parametrize('splits', [1, 16, 37])
def test_partial_sums_add_up(splits):
    partials = normal(torch.Generator().manual_seed(0), 3, splits, 5, 33)
    expected = partials.sum(1) * 0.25 / 7
    torch.testing.assert_close(_launch.add_up(partials, 0.25, 7), expected, rtol=0, atol=1e-14)


def test_one_channel_a_head_of_loud_tokens():
    """The gradient is all along G, of which the damping leaves 1/(‖G‖ + 1)."""
    op, hw = OPS['ttt_glu'], (5, 3)
    inputs = op.make(hw, dim=1, batch=1, dtype=torch.float32)
    inputs |= {n: inputs[n] * 1e3 for n in op.tokens}
    exact = {n: x.double() for n, x in inputs.items()}
    actual = with_gradients(lambda x: op.call(x, hw, backend='triton'), inputs)
    expected = with_gradients(lambda x: op.call(x, hw, backend='reference'), exact)
    assert_same(actual, expected, 1e-5)


# -------------------------------------------------------------------------------------- deform_attn


# Two levels, and queries that few programs take: the interpreter is slow.
LEVELS = ((3, 4), (2, 2))


def few(queries=5, heads=2, dtype=torch.float64):
    return sampling.make(LEVELS, queries, heads=heads, dtype=dtype)


@pytest.mark.parametrize(
    ('backend', 'dtype'),
    [('reference', torch.int64), ('triton', torch.int64), ('triton', torch.int32)],
)
def test_sizes_in_a_tensor_are_those_in_numbers(backend, dtype):
    inputs, sizes = few(3, heads=1), torch.tensor(LEVELS, dtype=dtype)
    expected = with_gradients(sampling.call, inputs, LEVELS, backend=backend)
    actual = with_gradients(sampling.call, inputs, sizes, backend=backend)
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][n], x) for n, x in expected[1].items())
    if backend != 'triton':  # which does not read a tensor on a GPU
        with pytest.raises(ValueError, match='S = 16'):
            sampling.call(inputs, torch.ones_like(sizes), backend=backend)


@pytest.mark.parametrize('backend', ['reference', 'triton'])
def test_a_location_that_is_no_number_spoils_its_own_query_only(backend):
    inputs = few(6, dtype=torch.float32)
    expected = sampling.call(inputs, LEVELS, backend=backend)
    inputs['sampling_locations'][0, 2, 1, 0, 0] = torch.tensor([float('nan'), 0.5])
    inputs['sampling_locations'][0, 3, 1] = float('inf')
    inputs['sampling_locations'][0, 4, 1] = -1e38
    output, grads = with_gradients(sampling.call, inputs, LEVELS, backend=backend)
    assert output.isnan()[0, 2, 5:].all()
    # Infinitely far outside is outside: zeros.
    assert output[0, 3:5, 5:].eq(0).all()
    others = torch.ones(2, 6, 10, dtype=torch.bool)
    others[0, 2:5] = False
    assert torch.equal(output[others], expected[others])
    assert grads['sampling_locations'][1].isfinite().all()


@pytest.mark.parametrize('dtype', [FP32, FP16], ids=str)
def test_the_tiles_of_a_gpu(dtype):
    case, op = pyramid(((3, 4), (2, 2)), queries=4, batch=1, heads=2, dim=32), OPS['deform_attn']
    op.check(case, dtype, 'triton', op.kernel_tolerance)


def test_sizes_beyond_the_values_count_as_zeros(several_programs):
    """The host does not read a tensor on a GPU; nothing outside of the values may be touched."""
    inputs = sampling.make(LEVELS, 5, dtype=torch.float32)
    sizes = torch.tensor([[3, 4], [90, 70]])
    actual = with_gradients(lambda x: sampling.call(x, sizes, backend='triton'), inputs)
    inputs['attention_weights'][:, :, :, 1] = 0
    expected = sampling.call(inputs, LEVELS, backend='reference')
    assert error(actual[0], expected) < 1e-6
    assert actual[1]['value'][:, 12:].eq(0).all()


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
            lambda x, b=backend: sampling.call(x, ((1, 4),), backend=b), inputs, grad=grad
        )
        assert output.flatten().tolist() == [0, 1, 10, 100]
        assert grads['sampling_locations'][..., 0].flatten().tolist() == [4, 36, 360, -400]


@pytest.mark.parametrize('size', [50_000, 20_000])
def test_indices_beyond_32_bits_are_left_to_the_reference(size):
    from ttt_kernels.deform_attn import kernel

    value = torch.empty((1, size * size, 2, 16), device='meta')
    places, weights = torch.empty(1, 3, 2, 1, 4, 2), torch.empty(1, 3, 2, 1, 4)
    args = value, [size, size], None, places, weights
    assert 'need 64-bit indices' in kernel.unsupported_reason(args)


@pytest.mark.parametrize(('dim', 'width'), [(64, 64), (128, 100), (16, 7)])
def test_rows_of_many_images_are_added_in_several_turns(dim, width):
    """As the gradients of parameters are: 4096 / dim rows a turn, here two turns and a part."""
    splits = 3
    groups, step = 2 * 4096 // dim // splits + 5, splits * width + 2
    x = normal(torch.Generator().manual_seed(0), groups * step)
    out = torch.full((dim,), torch.nan, dtype=x.dtype)
    add_rows[(1,)](x, groups, step, splits, out, D=dim, WIDTH=width)
    rows = x.as_strided((groups, splits, width), (step, width, 1))
    torch.testing.assert_close(out[:width], rows.sum((0, 1)), rtol=1e-13, atol=1e-13)
    assert out[width:].isnan().all()


@triton.jit
def add_first_rows(x, groups, step, splits, out, D: tl.constexpr, WIDTH: tl.constexpr):
    """As `add_rows` without its loop: the rows of its first turn."""
    add_rows(x, tl.minimum(groups, 4096 // D // splits), step, splits, out, D, WIDTH)


@pytest.mark.parametrize('turns', ['all', 'first'])
def test_the_check_of_three_images_sees_sums_of_many(turns, monkeypatch):
    if turns == 'first':
        monkeypatch.setattr(_backward_kernels, 'add_rows', add_first_rows)
    args = (*make(17, dim=32, batch=3, dtype=FP32).values(), 'fb', 16, 1e-6)
    record = _op.OPS['ttt_linear']
    verdict = _compare.compare(record, kernel, [*map(_check.layout, args)], 3, 'cpu')
    assert verdict.startswith('the sum of many images' if turns == 'first' else _check.AGREES)
