"""The Triton kernels of ttt_linear in Triton's interpreter, against the fp64 reference.

The interpreter knows neither races nor layouts nor the GPU's rounding, and its bf16 is wrong: fp64,
fp32 and fp16 it is here; test_ttt_linear_gpu.py has the rest.
"""

import pytest
import torch
import triton
import triton.language as tl
from kernel_testing import assert_same, error, with_gradients
from ops import OPS
from scans import NAMES, OP, OP_BACKWARD, call, make

from ttt_kernels.ttt_linear._tiles import dense_start, scan_start, tile_pointers
from ttt_kernels.ttt_linear.definition import Inputs

interpreter = pytest.mark.interpreter
TOKENS = (1, 15, 16, 17, 52, 64, 196)
# Relative to the largest value. The two sides add up in another order; in half precision they also
# round the operands at other places: a few units of 2⁻¹¹, through a chain of chunks.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3}


def on_triton(inputs, ways='fb', **options):
    return call(inputs, ways, backend='triton', **options)


def sizes(tokens):
    return {'batch': 1 if tokens > 100 else 2, 'heads': 1, 'dim': 64 if tokens % 2 else 32}


def check(inputs, ways='fb', **options):
    """Inputs of special values against the reference in fp64; op.check makes its own."""
    exact = {n: x if x is None else x.double() for n, x in inputs.items()}
    actual = with_gradients(lambda x: on_triton(x, ways, **options), inputs)
    expected = with_gradients(lambda x: call(x, ways, backend='reference', **options), exact)
    assert_same(actual, expected, TOLERANCE[inputs['q'].dtype])


@interpreter
@pytest.mark.parametrize('tokens', TOKENS)
def test_fused_path_and_every_gradient(tokens, cut):
    cut(0, 3)
    check(make(tokens, **sizes(tokens)))


@interpreter
@pytest.mark.parametrize('tokens', TOKENS)
def test_scan_in_segments_and_every_gradient(tokens, cut):
    # One segment of one mini-batch, of several, a ragged last one, and a single long one.
    cut({1: 1, 15: 3, 16: 2, 17: 1, 52: 2, 64: 2, 196: 5}[tokens])
    check(make(tokens, **sizes(tokens)))


@interpreter
@pytest.mark.parametrize('case', OPS['ttt_linear'].kernel_cases)
def test_in_segments_of_one_mini_batch(case, cut):
    cut(1)
    OPS['ttt_linear'].check(case, torch.float64, 'triton', TOLERANCE)


@interpreter
@pytest.mark.parametrize(
    ('size', 'tokens', 'segment'),
    # Several chunks, in segments of one and two, ragged; padded; more than all tokens.
    [(32, 70, 2), (64, 150, 8), (24, 80, 0), (8, 20, 1), (1, 3, 0), (100, 30, 1)],
)
def test_mini_batches_of_any_size(size, tokens, segment, cut):
    cut(segment)
    check(make(tokens, size=size, batch=1, heads=1, dim=32), size=size)


@interpreter
@pytest.mark.parametrize(('size', 'tokens'), [(4, 10), (16, 5)])
def test_what_fills_up_a_chunk_is_no_nan_without_eps(size, tokens, cut):
    cut(0, 3)
    # One image, one head: their own tokens have a variance.
    inputs = make(tokens, size=size, batch=1, heads=1, dim=32, dtype=torch.float32)
    check({**inputs, 'b0': torch.zeros_like(inputs['b0'])}, size=size, eps=0.0)


@interpreter
def test_a_nan_is_seen_in_half_precision(cut):
    cut(0, 3)
    inputs = make(20, 'f', batch=1, heads=1, dim=32, dtype=torch.float16)
    inputs['v'] = inputs['v'].clone()
    inputs['v'][0, 3, 0, 0, 5] = torch.nan
    # In its mini-batch, whose products it is in, and in all that follow: as in the reference.
    for backend in ('triton', 'reference'):
        assert call(inputs, 'f', backend=backend).isnan().all()


@interpreter
@pytest.mark.parametrize(('segment', 'size'), [(0, 16), (2, 16), (1, 24), (0, 32)])
def test_both_backends_save_the_same(segment, size, cut):
    # The backward pass of one can follow the forward pass of the other.
    cut(segment)
    tensors = make(52, size=size, dim=32).values()
    actual, expected = (OP(*tensors, 'fb', size, 1e-6, way) for way in ('triton', 'reference'))
    for name, x, y in zip(('o', 'z_kept', 'w_kept', 'c_kept'), actual, expected, strict=True):
        assert x.shape == y.shape, name
        assert error(x, y) < TOLERANCE[torch.float64], name


@interpreter
@pytest.mark.parametrize('backend', ['triton', 'reference'])
def test_no_gradient_depends_on_a_mean_of_what_was_saved(backend, cut):
    # Rounding gives Z and the states a mean over the features, which LayerNorm ignores.
    cut(2)
    inputs = make(52, batch=1, heads=1, dim=20).values()
    o, *saved = OP(*inputs, 'fb', 16, 1e-6, backend)
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
    shifted = [x + 0.1 for x in saved]
    found = OP_BACKWARD(grad, *inputs, *shifted, 'fb', 16, 1e-6, backend)
    expected = OP_BACKWARD(grad, *inputs, *saved, 'fb', 16, 1e-6, backend)
    for name, x, y in zip(NAMES, found, expected, strict=True):
        assert error(x, y) < TOLERANCE[torch.float64], name


@interpreter
@pytest.mark.parametrize(('first', 'then'), [('triton', 'reference'), ('reference', 'triton')])
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_one_backend_follows_the_other(first, then, dtype, cut):
    cut(0, 3)
    # 20 channels: the kernels fill them up to 32.
    inputs = make(37, batch=1, heads=1, dim=20, dtype=dtype)
    o, *kept = OP(*inputs.values(), 'fb', 16, 1e-6, first)
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = OP_BACKWARD(grad, *inputs.values(), *kept, 'fb', 16, 1e-6, then)
    exact = {n: x.double() for n, x in inputs.items()}
    _, expected = with_gradients(lambda x: call(x, backend='reference'), exact, grad=grad)
    for (name, y), x in zip(expected.items(), actual, strict=True):
        assert error(x, y) < TOLERANCE[dtype], name


@interpreter
@pytest.mark.parametrize('apart', [False, True])
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_the_output_is_the_same_whether_or_not_anything_is_kept(apart, dtype, cut):
    cut(2 if apart else 0, 3)
    inputs = make(52, batch=1, heads=1, dim=32, dtype=dtype)
    kept, not_kept = (OP(*inputs.values(), 'fb', 16, 1e-6, 'triton', x)[0] for x in (True, False))
    assert torch.equal(kept, not_kept)


@interpreter
@pytest.mark.parametrize('segment', [0, 2])
def test_nothing_is_kept_without_gradients(segment, cut):
    cut(segment)
    inputs = make(52, dim=32)
    kept = []
    for way in ('triton', 'reference'):
        o, z_kept, w_kept, c_kept = OP(*inputs.values(), 'fb', 16, 1e-6, way, False)
        assert z_kept.numel() == w_kept.numel() == c_kept.numel() == 0
        kept.append(o)
    assert error(*kept) < TOLERANCE[torch.float64]
    assert torch.equal(on_triton(inputs), kept[0])


@interpreter
def test_the_same_bits_twice(cut):
    inputs = make(50, batch=1, heads=1, dim=32, dtype=torch.float16)
    outputs = []
    for segment in (0, 0, 2, 2):
        cut(segment)
        outputs.append(with_gradients(on_triton, inputs))
    for (output, grads), (again, grads_again) in (outputs[:2], outputs[2:]):
        assert torch.equal(output, again)
        assert all(torch.equal(grads[n], grads_again[n]) for n in NAMES)
    # A state that was kept loses its mean anew: one rounding of fp32 between the paths.
    assert error(outputs[2][0], outputs[0][0]) < 1e-3


@interpreter
@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'dim': 136}, 'd is 136; the kernels have at most 128'),
        ({'dtype': torch.bfloat16}, r'q is torch\.bfloat16; the kernels have torch\.float32'),
        ({'ways': 'f' * 32}, 'R is 32; the kernels have at most 31'),
    ],
)
def test_what_the_kernels_cannot_run_is_named(change, message):
    options = {'dim': 32, 'batch': 1, 'heads': 1, 'ways': 'fb', **change}
    with pytest.raises(RuntimeError, match=f"backend='triton' cannot run here: {message}"):
        on_triton(make(2, **options), options['ways'])


def test_a_token_too_far_from_the_next_is_named():
    from ttt_kernels.ttt_linear import kernel

    inputs = make(2, dim=32, dtype=torch.float32)
    far = torch.empty((2**27 + 64) // 32, 1, 2, 2, 32, device='meta')
    far = far.as_strided((2, 2, 2, 2, 32), (1, 2**27, 64, 32, 1))
    reason = kernel.unsupported_reason(Inputs(**{**inputs, 'k': far}), 16)
    assert 'k has 134217728 elements from token to token' in reason


@interpreter
def test_large_mini_batches_of_large_heads_in_fp32_have_no_kernel():
    from ttt_kernels.ttt_linear import kernel

    for dim, size, none in ((72, 17, True), (72, 16, False), (64, 17, False)):
        inputs = Inputs(**make(2, size=size, dim=dim, dtype=torch.float32))
        reason = kernel.unsupported_reason(inputs, size)
        assert (reason or '').endswith('at most 16, not 17') == none, (dim, size)


@interpreter
def test_a_gpu_with_little_shared_memory_is_told_so(monkeypatch):
    from ttt_kernels import _launch
    from ttt_kernels.ttt_linear import kernel

    monkeypatch.setattr(_launch, 'gpu', lambda *_: _launch.Gpu(little=True))
    for dim, dtype in ((72, torch.float32), (72, torch.float16), (64, torch.float32)):
        reason = kernel.unsupported_reason(Inputs(**make(2, dim=dim, dtype=dtype)), 16)
        assert (reason or '').endswith('too little shared memory') == (
            (dim, dtype) == (72, torch.float32)
        )


@triton.jit
def write_offsets(
    out, scan, T, R, H, reverse_mask, b, t, r, h, n, SIZE: tl.constexpr, DENSE: tl.constexpr
):
    D: tl.constexpr = 64
    start, step = scan_start(scan, T, R, H, reverse_mask, (b, t, r, h))
    if DENSE:
        start, step = dense_start(scan, T, R, H, reverse_mask, D)
    tile = tl.arange(0, 16)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + tile, tile_pointers(start, step, n, D, SIZE))


@interpreter
@pytest.mark.parametrize('dense', [True, False])
@pytest.mark.parametrize('last', [True, False])
@pytest.mark.parametrize('size', [16, 24])
def test_offsets_do_not_overflow(last, dense, size):
    batch, tokens, scans, heads, dim = 9, 2**21 + 5, 2, 12, 64
    b, t, r, h = tokens * scans * heads * dim, scans * heads * dim, heads * dim, dim
    if not dense:
        # A view into a packed projection.
        b, t = 3 * b, 3 * t
    assert batch * b > 2**34
    scan = batch * scans * heads - 1 if last else 0
    image, way, head = scan // (scans * heads), scan // heads % scans, scan % heads
    # The last one; mini-batches of 24 tokens are two chunks each.
    chunk = triton.cdiv(tokens, 16) - 1 if size == 16 else 2 * (tokens // 24) + 1
    out = torch.empty(16, dim, dtype=torch.int64)
    where = (scan, tokens, scans, heads, 0b10, b, t, r, h, chunk)
    write_offsets[(1,)](out, *where, SIZE=size, DENSE=dense)
    places = (chunk * 16 if size == 16 else tokens // 24 * 24 + 16) + torch.arange(16)
    # The second scan runs backward.
    places = tokens - 1 - places if way else places
    rows = image * b + places * t + way * r + head * h
    assert torch.equal(out, rows[:, None] + torch.arange(dim))


def test_few_scans_of_many_tokens_have_their_output_from_a_kernel_of_its_own():
    from ttt_kernels.ttt_linear.kernel import output_apart

    assert output_apart(64, scans_per_sm=12 / 132, tokens=4200)
    assert not output_apart(64, scans_per_sm=12 / 132, tokens=196)
    assert not output_apart(64, scans_per_sm=3072 / 132, tokens=4200)
