"""causal_conv: reference, numba and, in the interpreter, the kernels against the definition."""

import pytest
import torch
import torch.nn.functional as F
from convolutions import call, make, primal
from kernel_testing import assert_same, normal, with_gradients

from ttt_kernels import causal_conv, decompositions

inside = pytest.mark.interpreter
# Sums in another order; in half precision the results are rounded, and nothing else.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
# Tokens, scans, weights, channels, taps.
SIZES = [
    (1, 'b', 1, 16, 4),
    (2, 'fb', 2, 5, 4),
    (3, 'bf', 2, 6, 8),
    (37, 'fb', 2, 70, 3),
    (130, 'f', 1, 64, 1),
]


@pytest.fixture(params=['reference', 'numba'])
def backend(request):
    if request.param == 'numba':
        pytest.importorskip('numba', reason='numba is not installed')
    return request.param


def agrees(backend, tokens, ways, weights, channels, taps, dtype):
    inputs = make(tokens, ways, weights=weights, channels=channels, taps=taps, dtype=dtype)
    exact = {n: x.double() for n, x in inputs.items()}
    found = with_gradients(call, inputs, ways, backend)
    assert found[0].dtype == dtype
    assert all(g.dtype == inputs[n].dtype for n, g in found[1].items())
    assert_same(found, with_gradients(primal, exact, ways), TOLERANCE[dtype])


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('size', SIZES, ids=str)
def test_output_and_every_gradient(backend, size, dtype):
    agrees(backend, *size, dtype)


@inside
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize('size', SIZES, ids=str)
def test_the_kernels(size, dtype, monkeypatch):
    from ttt_kernels import _launch

    # Sums of several programs.
    monkeypatch.setattr(_launch, '_ENOUGH', 1 << 20)
    monkeypatch.setattr(_launch, '_LEAST_BLOCKS', 1)
    agrees('triton', *size, dtype)


def test_the_definition_is_a_conv1d_of_each_scan():
    inputs = make(9, 'fb', weights=1)
    x, weight = inputs.values()
    found = primal(inputs, 'fb')
    for r, turn in enumerate(((), (1,))):
        past = F.pad(x[:, :, r].flip(turn).mT, (3, 0))
        expected = F.conv1d(past, weight[r][:, None], groups=6).mT.flip(turn)
        torch.testing.assert_close(found[:, :, r], expected)


def test_one_output_that_nobody_uses(backend):
    inputs = {n: x.requires_grad_() for n, x in make(7).items()}
    ways = {'directions': ('forward', 'backward'), 'backend': backend}
    leaves = list(inputs.values())
    for used in (0, 1):
        found = causal_conv(*leaves, **ways)[used]
        expected = causal_conv(leaves[0], leaves[1 + used], **ways)[0]
        found, expected = (
            torch.autograd.grad(y.sum(), (leaves[0], leaves[1 + used])) for y in (found, expected)
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_any_strides_and_an_empty_batch(backend):
    inputs = make(7, batch=1)
    expected = with_gradients(call, inputs, 'fb', backend)
    turned = inputs['x'].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert_same(with_gradients(call, {**inputs, 'x': turned}, 'fb', backend), expected, 1e-14)
    grad = torch.ones((), dtype=torch.float64).expand(expected[0].shape)
    assert_same(
        with_gradients(call, inputs, 'fb', backend, grad=grad),
        with_gradients(primal, inputs, 'fb', grad=grad.contiguous()),
        1e-14,
    )
    output, grads = with_gradients(call, make(7, batch=0), 'fb', backend)
    assert output.shape == (0, 7, 2, 12)
    assert not any(g.any() for g in grads.values())


def test_a_token_sees_its_past_alone(backend):
    inputs = make(9, weights=1)
    before = call(inputs, 'fb', backend)
    inputs['x'] = inputs['x'].clone()
    inputs['x'][:, 4] += 1
    changed = (call(inputs, 'fb', backend) != before).any(-1).any(0)
    assert changed[:, 0].nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert changed[:, 1].nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_opcheck_shapes_and_one_graph():
    x, weight, other = (t.requires_grad_() for t in make(5, dtype=torch.float32).values())
    op = torch.ops.ttt_kernels.causal_conv
    for tensors in ((x, weight, other), (x, weight, None)):
        torch.library.opcheck(op.default, (*tensors, 'fb', 'auto'))
        real = op(*tensors, 'fb', 'reference')
        meta = op(*(t if t is None else t.to('meta') for t in tensors), 'fb', 'auto')
        for y, z in zip(real, meta, strict=True):
            assert (y.shape, y.dtype, y.stride()) == (z.shape, z.dtype, z.stride())
    compiled = torch.compile(call, fullgraph=True, backend='aot_eager')
    inputs = make(5, dtype=torch.float32)
    assert_same(with_gradients(compiled, inputs), with_gradients(call, inputs), 1e-6)


def test_exporters_get_the_definition():
    x, weight, other = make(7).values()
    instead = decompositions()[torch.ops.ttt_kernels.causal_conv.default]
    y, z = instead(x, weight, other, 'fb', 'auto')
    torch.testing.assert_close(torch.cat((y, z), -1), call(make(7)))
    assert instead(x, weight, None, 'fb', 'auto')[1].numel() == 0


def test_autocast_rounds_the_tokens_and_not_the_weights():
    inputs = make(7, dtype=torch.float32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        found = call(inputs)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, call({**inputs, 'x': inputs['x'].bfloat16()}))


def test_flops_are_those_of_the_convolutions():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, other = (t.requires_grad_() for t in make(7, dtype=torch.float32).values())
    counter = FlopCounterMode(display=False)
    with counter:
        sum(causal_conv(x, weight, other)).sum().backward()
    forward = 2 * 4 * 2 * x.numel()
    assert counter.get_total_flops() == 3 * forward


def test_the_same_bits_with_any_number_of_threads(monkeypatch):
    pytest.importorskip('numba', reason='numba is not installed')
    monkeypatch.setattr('ttt_kernels._numba._WORTH_A_THREAD', 1)
    inputs = make(50, channels=33, batch=3, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            output, grads = with_gradients(call, inputs, 'fb', 'numba')
            found.append((output, *grads.values()))
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True)
    )


def test_what_it_refuses():
    x, weight, other = make(5).values()
    for arguments, words in (
        ((x,), 'one or two weights, got 0'),
        ((x, weight, other, other), 'one or two weights, got 3'),
        ((x[0], weight), 'x must have shape'),
        ((x[:, :0], weight), 'T must be at least 1'),
        ((x, weight[..., :0]), 'K ≥ 1'),
        ((x, weight, other[..., 1:]), r'other must have shape \(R, C, K\)'),
        ((x, weight[:1]), 'weight must have shape'),
    ):
        with pytest.raises(ValueError, match=words):
            causal_conv(*arguments)
    with pytest.raises(TypeError, match=r'weight must be torch\.float64'):
        causal_conv(x, weight.float())
    with pytest.raises(ValueError, match='R = 2 scans for 1 directions'):
        causal_conv(x, weight, directions=('forward',))


def test_kernels_of_many_taps_are_refused():
    kernel = pytest.importorskip('ttt_kernels.causal_conv.kernel', reason='Triton is missing')
    x, weight = make(5, weights=1, taps=9).values()
    assert kernel.supported(x, weight) == 'K is 9; the kernels have at most 8 taps'
    assert call({'x': x, 'weight': weight}, backend=None).shape == x.shape
    grad = normal(torch.Generator().manual_seed(3), *x.shape)
    assert with_gradients(call, {'x': x, 'weight': weight}, grad=grad)[0].shape == x.shape
