"""The Triton kernels of the inner steps in Triton's interpreter, against the references.

The interpreter knows neither races nor layouts, and its bf16 is wrong: fp64, fp32 and fp16 it is.
"""

import pytest
import torch
import triton
import triton.language as tl
from inner_steps import CASES
from kernel_testing import assert_same, normal, with_gradients

inside = pytest.mark.interpreter
# The two sides differ by the order of their sums.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def several_programs(monkeypatch):
    """Shares a sum among as many programs as there are blocks, which few then add up."""
    from ttt_kernels import _launch

    monkeypatch.setattr(_launch, '_ENOUGH', 1 << 20)
    monkeypatch.setattr(_launch, '_LEAST_BLOCKS', 1)
    monkeypatch.setattr(_launch, '_COLUMNS', 1024)


@pytest.fixture
def one_program(monkeypatch):
    from ttt_kernels import _launch

    monkeypatch.setattr(_launch, '_ENOUGH', 1)


def check(case, hw, dtype=torch.float64, tolerance=None, options=None, **sizes):
    inputs = case.make(hw, dtype=dtype, **sizes)
    exact = {n: x.double() for n, x in inputs.items()}
    options = options or {}
    found = with_gradients(case.call, inputs, hw, **options, backend='triton')
    assert found[0].dtype == dtype
    assert {n: g.dtype for n, g in found[1].items()} == {n: x.dtype for n, x in inputs.items()}
    expected = with_gradients(case.primal, exact, hw, **options)
    assert_same(found, expected, tolerance or TOLERANCE[dtype])


@inside
@pytest.mark.parametrize(
    ('hw', 'dim'),
    [((1, 1), 32), ((1, 7), 64), ((3, 5), 32), ((7, 9), 64), ((9, 13), 32), ((14, 14), 32)],
)
def test_every_gradient_equals_that_of_the_definition(case, hw, dim, several_programs):
    check(case, hw, dim=dim, batch=2 if dim == 32 and hw[0] < 9 else 1)


@inside
def test_one_program_takes_a_whole_sum(case, one_program):
    check(case, (3, 40), dim=32, batch=1, options=case.other)


@inside
@pytest.mark.parametrize(('name', 'dim'), [('glu', 5), ('glu', 48), ('mlp', 48), ('swiglu', 5)])
def test_heads_of_other_sizes_are_padded(name, dim):
    check(CASES[name], (3, 13), dim=dim)
    check(CASES[name], (3, 13), dim=dim, options=CASES[name].other)


@inside
@pytest.mark.parametrize('dim', [1, 5, 80])
def test_dwconv_takes_any_number_of_channels(dim):
    check(CASES['dwconv'], (3, 13), dim=dim)


@inside
def test_single_precision(case, several_programs):
    check(case, (9, 13), torch.float32, dim=32, batch=1)


@inside
def test_half_precision(case, several_programs):
    # Unit roundoff 2⁻¹¹ of every operand of a product, a few of them in a row.
    check(case, (5, 9), torch.float16, tolerance=5e-3, dim=64, batch=1)


@inside
def test_small_values_do_not_underflow_in_half_precision(case, several_programs):
    # v/N would be around 1e-6, of which fp16 keeps four bits, as that of a map of 66 800 tokens.
    hw = (20, 30)
    inputs = case.make(hw, 32, 1, dtype=torch.float16)
    inputs['v'] = inputs['v'] * 2**-10
    _, g = case.op(*case.tensors(inputs), *case.rest(hw, backend='triton'))
    exact = {n: x.double() for n, x in inputs.items()}
    _, expected = case.op(*case.tensors(exact), *case.rest(hw, backend='reference'))
    # The gated model rounds the operands of its products to 11 bits.
    assert ((g - expected).norm() / expected.norm()).item() < 2e-3


@inside
def test_small_gradients_keep_their_bits_in_half_precision(case, several_programs):
    # dO near the least normal number of fp16: its mean products over the tokens lie far below.
    hw = (14, 14)
    inputs = {n: x.requires_grad_() for n, x in case.make(hw, 32, 1, dtype=torch.float16).items()}
    exact = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    grad = normal(torch.Generator().manual_seed(1), *inputs['q'].shape)
    grad = (grad.abs() * 2**-13).half()
    names = [n for n in inputs if n.startswith('w')]
    found, expected = (
        torch.autograd.grad(
            case.call(x, hw, backend=backend), [x[n] for n in names], grad.to(x['q'].dtype)
        )
        for x, backend in ((inputs, 'triton'), (exact, 'reference'))
    )
    for name, x, y in zip(names, found, expected, strict=True):
        assert ((x - y).norm() / y.norm()).item() < 5e-3, name


@inside
@pytest.mark.parametrize('zero', ['q', 'k', 'v'])
def test_a_zero_gradient_has_a_derivative(case, zero):
    inputs = case.make((3, 3), dim=32)
    inputs[zero] = torch.zeros_like(inputs[zero])
    expected = with_gradients(case.primal, inputs, (3, 3))
    assert_same(with_gradients(case.call, inputs, (3, 3), backend='triton'), expected, 1e-12)


@inside
@pytest.mark.parametrize('layout', ['reversed', 'expanded', 'far apart'])
def test_any_strides(case, layout, monkeypatch):
    inputs = case.make((3, 5), dim=32, dtype=torch.float16)
    expected = case.call(inputs, (3, 5), backend='triton')
    for name in 'qkv':
        x = inputs[name]
        if layout == 'reversed':
            turn = tuple(range(x.dim()))[::-1]
            x = x.permute(turn).contiguous().permute(turn)
        elif layout == 'expanded':
            inputs[name] = x[:1].clone()
            x = inputs[name].expand_as(x)
        else:
            # 5 GB of address space, of which a few pages are touched: offsets beyond 2³¹.
            monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', False)
            step = 180_000_000
            strides = (x[0, 0].numel(), step, *x[0, 0].contiguous().stride())
            x = torch.empty(15 * step, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)
        inputs[name] = x
    if layout == 'expanded':
        expected = expected[:1].expand_as(expected)
    torch.testing.assert_close(
        case.call(inputs, (3, 5), backend='triton'), expected, rtol=0, atol=0
    )


@inside
@pytest.mark.parametrize('layout', ['expanded', 'slice'])
def test_strided_gradients(case, layout):
    inputs = {n: x.requires_grad_() for n, x in case.make((3, 5), dim=32).items()}
    output = case.call(inputs, (3, 5), backend='triton')
    grad = torch.ones((), dtype=torch.float64).expand(output.shape)
    if layout == 'slice':
        shape = (*output.shape[:-1], 3 * output.shape[-1])
        grad = normal(torch.Generator().manual_seed(2), *shape)[..., : output.shape[-1]]
    leaves = list(inputs.values())
    found = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    expected = torch.autograd.grad(output, leaves, grad.contiguous())
    for name, x, y in zip(inputs, found, expected, strict=True):
        assert torch.equal(x, y), name


@inside
def test_what_the_kernels_leave_to_the_reference():
    for name, dim in (('glu', 65), ('mlp', 72), ('swiglu', 128)):
        inputs = CASES[name].make((2, 2), dim=dim)
        with pytest.raises(RuntimeError, match=f'd is {dim}; the kernels have at most 64'):
            CASES[name].call(inputs, (2, 2), backend='triton')
    for case in CASES.values():
        with pytest.raises(RuntimeError, match='the batch is empty'):
            case.call(case.make((2, 2), dim=32, batch=0), (2, 2), backend='triton')


@inside
@pytest.mark.parametrize(('tokens', 'sums'), [(1, 1), (17, 3), (196, 768), (66_800, 3), (6400, 0)])
def test_every_token_has_one_program(tokens, sums):
    from ttt_kernels import _launch

    splits, span = _launch.split(tokens, sums, 32)
    assert span % 32 == 0
    assert (splits - 1) * span < tokens <= splits * span


@inside
@pytest.mark.parametrize('splits', [1, 16, 37])
def test_partial_sums_add_up(splits):
    from ttt_kernels import _launch

    partials = normal(torch.Generator().manual_seed(0), 3, splits, 5, 33)
    expected = partials.sum(1) * 0.25 / 7
    torch.testing.assert_close(_launch.add_up(partials, 0.25, 7), expected, rtol=0, atol=1e-14)


@triton.jit
def step_of_integers(x, out, OP: tl.constexpr):
    number = tl.load(x)
    if OP == 'add':
        tl.store(out, number + number)
    elif OP == 'sub':
        tl.store(out, -2 - number)
    else:
        tl.store(out, number * number)


@inside
@pytest.mark.parametrize(('op', 'fits'), [('add', 2**30), ('sub', 2**31 - 1), ('mul', 46_341)])
def test_an_index_beyond_its_type_is_seen(op, fits):
    out, most = torch.zeros(1, dtype=torch.int32), torch.tensor([fits - 1], dtype=torch.int32)
    step_of_integers[(1,)](most, out, OP=op)
    expected = {'add': 2**31 - 2, 'sub': -(2**31), 'mul': 46_340**2}[op]
    assert out.item() == expected
    with pytest.raises(Exception, match=f'overflow: {op}'):
        step_of_integers[(1,)](most + 1, out, OP=op)
