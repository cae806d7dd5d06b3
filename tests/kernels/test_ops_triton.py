"""The Triton kernels of every op in Triton's interpreter, against the definitions.

The interpreter knows neither races nor layouts nor the GPU's rounding, and its bf16 is wrong: fp64,
fp32 and fp16 it is. The ops are the rows of ops.py.
"""

import pytest
import torch
import triton
import triton.language as tl
from kernel_testing import RecordedOps, normal, with_gradients
from op_row import FP16, FP32, FP64
from ops import OPS

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures('several_programs')]
HW = (3, 5)
every_op = pytest.mark.parametrize('op', OPS.values(), ids=OPS)


def on_triton(op):
    return lambda inputs, hw=HW, **options: op.call(inputs, hw, backend='triton', **options)


@pytest.mark.parametrize(
    ('op', 'case'),
    [
        pytest.param(o, c, id=f'{n}-{i}')
        for n, o in OPS.items()
        for i, c in enumerate(o.kernel_cases)
    ],
)
def test_output_and_every_gradient_follow_the_definition(op, case):
    op.check(case, FP64, 'triton', op.kernel_tolerance)


@every_op
def test_the_same_bits_twice(op):
    inputs = op.make((5, 9), batch=1, dim=32, dtype=FP16)
    first, again = (with_gradients(on_triton(op), inputs, (5, 9)) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(first[1][n], x) for n, x in again[1].items())


@pytest.mark.parametrize('layout', ['reversed', 'expanded', 'far apart'])
@every_op
def test_any_strides(op, layout, monkeypatch):
    inputs = op.make(HW, dim=32, dtype=FP16)
    dense = dict(inputs)
    for name in op.tokens:
        x = inputs[name]
        if layout == 'reversed':
            turn = tuple(range(x.dim()))[::-1]
            inputs[name] = x.permute(turn).contiguous().permute(turn)
        elif layout == 'expanded':
            inputs[name] = x[:1].expand_as(x)
            dense[name] = inputs[name].contiguous()
        elif op.name not in ('ttt_linear', 'deform_attn'):
            # 5 GB of address space, of which a few pages are touched: offsets beyond 2³¹.
            # (deform_attn copies such values, ttt_linear refuses them.)
            monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', False)
            step = 180_000_000
            strides = (x[0, 0].numel(), step, *x[0, 0].contiguous().stride())
            x = torch.empty(15 * step, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)
            inputs[name] = x
    assert torch.equal(on_triton(op)(inputs), on_triton(op)(dense))


@pytest.mark.parametrize('layout', ['expanded', 'slice'])
@every_op
def test_strided_gradients(op, layout):
    inputs = op.make(HW, dim=32)
    shape = on_triton(op)(inputs).shape
    grad = torch.ones((), dtype=FP64).expand(shape)
    if layout == 'slice':
        wide = normal(torch.Generator().manual_seed(2), *shape[:-1], 3 * shape[-1])
        grad = wide[..., : shape[-1]]
    actual = with_gradients(on_triton(op), inputs, grad=grad)
    expected = with_gradients(on_triton(op), inputs, grad=grad.contiguous())
    assert all(torch.equal(actual[1][n], x) for n, x in expected[1].items())


@every_op
def test_opcheck(op):
    with RecordedOps() as calls:
        with_gradients(on_triton(op), op.make(HW, dim=32, batch=1, heads=1, dtype=FP32))
    checks = ('test_schema', 'test_autograd_registration', 'test_faketensor')
    for function, arguments, _ in calls:
        forward = not function.__name__.startswith(f'{op.name}_backward')
        leaves = [
            x.detach().requires_grad_(forward)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in arguments
        ]
        torch.library.opcheck(function, leaves, test_utils=checks)


@pytest.mark.parametrize(
    ('op', 'case', 'message'),
    [pytest.param(o, c, m, id=f'{n}: {m}') for n, o in OPS.items() for m, c in o.refused.items()],
)
def test_what_the_kernels_cannot_run_is_named(op, case, message):
    inputs = op.make(case.hw, dtype=FP32, **case.sizes)
    with pytest.raises(RuntimeError, match=f"backend='triton' cannot run here: {message}"):
        on_triton(op)(inputs, case.hw, **case.options)
    if inputs[op.tokens[0]].numel():
        # By default another implementation runs.
        assert op.call(inputs, case.hw, backend=None, **case.options).isfinite().all()


@triton.jit
def step_of_integers(x, out, OP: tl.constexpr):
    number = tl.load(x)
    if OP == 'add':
        tl.store(out, number + number)
    elif OP == 'sub':
        tl.store(out, -2 - number)
    else:
        tl.store(out, number * number)


@pytest.mark.parametrize(('op', 'fits'), [('add', 2**30), ('sub', 2**31 - 1), ('mul', 46_341)])
def test_an_index_beyond_its_type_is_seen(op, fits):
    out, most = torch.zeros(1, dtype=torch.int32), torch.tensor([fits - 1], dtype=torch.int32)
    step_of_integers[(1,)](most, out, OP=op)
    expected = {'add': 2**31 - 2, 'sub': -(2**31), 'mul': 46_340**2}[op]
    assert out.item() == expected
    with pytest.raises(Exception, match=f'overflow: {op}'):
        step_of_integers[(1,)](most + 1, out, OP=op)
