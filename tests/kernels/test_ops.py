"""Every op on the CPU: each backend by name against the definition, and its registration.

The ops, their calls and tolerances are the rows of ops.py.
"""

import importlib.util
import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from kernel_testing import assert_same, error, normal, opcheck, with_gradients
from op_row import BF16, FP16, FP32, FP64, Case
from ops import OPS, STEPS, inner_gradient
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ttt_kernels
from ttt_kernels import _backend, _op, available, causal_conv, decompositions

HW = (3, 5)
# Where numba is not installed its tests are skipped, and say so.
without_numba = pytest.mark.skipif(
    importlib.util.find_spec('numba') is None, reason='numba is not installed'
)
HAVE_NUMBA = {n: o for n, o in OPS.items() if 'no numba' not in str(available()[o.name]['numba'])}
BACKENDS = {(n, 'reference'): o for n, o in OPS.items()}
BACKENDS |= {(n, 'numba'): o for n, o in HAVE_NUMBA.items()}
WITH_TRITON = BACKENDS | {(n, 'triton'): o for n, o in OPS.items()}

MARKS = {'numba': without_numba, 'triton': pytest.mark.interpreter}


def marked(*values, name, backend='reference'):
    return pytest.param(*values, id=name, marks=MARKS.get(backend, ()))


every_op = pytest.mark.parametrize('op', [marked(o, name=n) for n, o in OPS.items()])
every_backend, with_triton = (
    pytest.mark.parametrize(
        ('op', 'backend'),
        [marked(o, b, name=f'{n}-{b}', backend=b) for (n, b), o in backends.items()],
    )
    for backends in (BACKENDS, WITH_TRITON)
)
on_numba = pytest.mark.parametrize(
    'op', [marked(o, name=n, backend='numba') for n, o in HAVE_NUMBA.items()]
)


def on(op, backend):
    """The op as a function of inputs, map and options."""
    return lambda inputs, hw=HW, **options: op.call(inputs, hw, backend=backend, **options)


@pytest.mark.parametrize(
    ('op', 'backend', 'case'),
    [
        marked(o, b, c, name=f'{n}-{b}-{i}', backend=b)
        for (n, b), o in WITH_TRITON.items()
        for i, c in enumerate(o.kernel_cases if b == 'triton' else o.cases)
    ],
)
def test_output_and_every_gradient_follow_the_definition(op, case, backend, request):
    if backend == 'triton':
        request.getfixturevalue('several_programs')
    op.check(case, FP64, backend, op.tolerance)


# -------------------------------------------------------------------------- images, memory layouts


@every_backend
def test_a_nan_stays_in_its_image(op, backend):
    # Programs follow each other in the same buffers; sizes leave padding in both directions.
    inputs = op.make(HW, batch=3, dim=18, dtype=FP32)
    expected = with_gradients(on(op, backend), inputs)
    for name in op.images:
        spoilt = {**inputs, name: inputs[name].clone()}
        spoilt[name][1] = torch.nan
        output, grads = with_gradients(on(op, backend), spoilt)
        assert output[1].isnan().any()
        for image in (0, 2):
            # Sizes are the same, so are the programs: the same bits but for torch's own products.
            torch.testing.assert_close(output[image], expected[0][image], rtol=0, atol=1e-5)
            for n in op.images:
                actual = grads[n][image]
                torch.testing.assert_close(actual, expected[1][n][image], rtol=0, atol=1e-4)


LAYOUTS = (
    lambda x: x[:1].expand_as(x),
    lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    lambda x: x.mT.contiguous().mT,
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
)


@pytest.mark.parametrize('first', [0, 3])
@with_triton
def test_any_strides(op, backend, first, request):
    """Every tensor has its own, the gradient of the output too."""
    if backend == 'triton':
        request.getfixturevalue('several_programs')
    dense = op.make(HW, dim=32)
    layouts = itertools.cycle((*LAYOUTS[first:], *LAYOUTS[:first]))
    grad = next(layouts)(normal(torch.Generator().manual_seed(2), *op.call(dense, HW).shape))
    inputs = dense | {n: next(layouts)(dense[n]) for n in op.images}
    dense = {n: x.contiguous() for n, x in inputs.items()}
    assert on(op, backend)(inputs).is_contiguous()
    actual = with_gradients(on(op, backend), inputs, grad=grad)
    expected = with_gradients(on(op, backend), dense, grad=grad.contiguous())
    assert_same(actual, expected, 1e-12)


@every_backend
def test_no_output_depends_on_fresh_memory_and_inputs_stay(op, backend):
    inputs = op.make(HW, dtype=BF16)
    copies = {n: x.clone() for n, x in inputs.items()}
    expected = with_gradients(on(op, backend), inputs)
    assert all(torch.equal(inputs[n], x) for n, x in copies.items())
    torch.use_deterministic_algorithms(True)  # torch then fills every torch.empty with NaN
    try:
        assert torch.empty(3).isnan().all()
        actual = with_gradients(on(op, backend), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(actual, expected, 1e-12)


@every_backend
def test_an_empty_batch_is_empty(op, backend):
    inputs = op.make(HW, batch=0)
    output, grads = with_gradients(on(op, backend), inputs)
    assert output.shape == (0, *on(op, backend)(op.make(HW)).shape[1:])
    assert {n: g.shape for n, g in grads.items()} == {n: x.shape for n, x in inputs.items()}
    assert not any(g.any() for g in grads.values())


class NoGradient(torch.autograd.Function):
    """The identity, whose input gets no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize('op', [o for o in OPS.values() if o.name.startswith('ttt')])
def test_an_output_that_gets_no_gradient(op):
    inputs = {n: x.requires_grad_() for n, x in op.make(HW).items()}
    NoGradient.apply(on(op, 'reference')(inputs)).sum().backward()
    assert all(x.grad is None for x in inputs.values())


# ------------------------------------------------------------------------------------ registration


@every_backend
def test_opcheck(op, backend):
    for case in (Case(HW), *op.variants):
        opcheck(op, backend, case, FP32)
    for dtype in (FP64, FP16, BF16):
        opcheck(op, backend, Case(HW), dtype, test_utils=('test_faketensor',))


@every_op
def test_compiles_into_one_graph(op):
    inputs = op.make(HW, dtype=FP32)
    # Inductor needs a compiler on the machine and treats a registered op the same way.
    # The ops share `on`, which torch would compile for eight of them only.
    torch.compiler.reset()
    compiled = torch.compile(on(op, 'reference'), fullgraph=True, backend='aot_eager')
    expected = with_gradients(on(op, 'reference'), inputs)
    assert_same(with_gradients(compiled, inputs), expected, 1e-6)


@every_op
def test_exports_with_any_batch_and_number_of_tokens(op, monkeypatch):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return on(op, None)(dict(zip(names, tensors, strict=True)))

    # These are called with the size of the map.
    hw = HW if op.name in ('ttt_dwconv', 'deform_attn') else (6, 9)
    inputs, larger = op.make(HW, dtype=FP32), op.make(hw, batch=5, dtype=FP32)
    names = tuple(inputs)
    free = {0: torch.export.Dim('batch', min=2, max=64)}
    if hw != HW:
        free[1] = torch.export.Dim('tokens', min=2, max=4096)
    sizes = tuple(free if n in op.images else None for n in names)
    program = torch.export.export(Module(), tuple(inputs.values()), dynamic_shapes=(sizes,))
    registered = getattr(torch.ops.ttt_kernels, op.name).default
    assert registered in {node.target for node in program.graph.nodes}
    actual = program.module()(*larger.values())
    torch.testing.assert_close(actual, on(op, None)(larger))
    # torch.onnx.export of a module gets torch's operators.
    monkeypatch.setattr(torch.onnx, 'is_in_onnx_export', lambda: True)
    program = torch.export.export(Module(), tuple(inputs.values()))
    assert registered not in {node.target for node in program.graph.nodes}
    torch.testing.assert_close(program.module()(*inputs.values()), on(op, None)(inputs))


class Decomposed(TorchDispatchMode):
    """Runs the decompositions in place of the ops, and counts them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        instead = decompositions().get(func)
        self.count += instead is not None
        return (instead or func)(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ('op', 'case'),
    [
        pytest.param(o, c, id=f'{n}-{i}')
        for n, o in OPS.items()
        for i, c in enumerate(o.cases)
        if (o.name, i) != ('ttt_linear', 6)  # as the one before, and 13 times as long
    ],
)
def test_exporters_get_the_same_in_their_operators(op, case):
    for dtype, tolerance in ((FP64, 1e-12), (BF16, op.tolerance[BF16])):
        inputs = op.make(case.hw, dtype=dtype, **case.sizes)
        expected = on(op, 'reference')(inputs, case.hw, **case.options)
        with Decomposed() as mode, torch.no_grad():
            actual = on(op, 'reference')(inputs, case.hw, **case.options)
        assert mode.count == 1
        assert actual.dtype == expected.dtype
        assert_same((actual, {}), (expected, {}), tolerance)


@pytest.mark.parametrize('compiled', [False, True])
@every_op
def test_autocast_rounds_the_tokens_and_nothing_else(op, compiled):
    inputs = op.make(HW, dtype=FP32)

    def under_autocast(x):
        with torch.autocast('cpu', dtype=BF16):
            return on(op, None)(x)

    function = under_autocast
    if compiled:
        torch.compiler.reset()
        function = torch.compile(under_autocast, fullgraph=True, backend='aot_eager')
    output, grads = with_gradients(function, inputs)
    tokens = op.tokens
    rounded = {n: x.bfloat16() if n in tokens else x for n, x in inputs.items()}
    expected, expected_grads = with_gradients(on(op, None), rounded)
    assert output.dtype == BF16
    assert torch.equal(output, expected)
    for name, grad in grads.items():
        assert grad.dtype == FP32
        assert torch.equal(grad, expected_grads[name].float()), name
    exact = {n: x.double() for n, x in inputs.items()}
    assert torch.equal(function(exact), on(op, None)(exact))


@every_op
def test_gradients_have_gradients(op):
    """Gradients of a penalty on all gradients, for every input, against differences in fp64.

    The literal definition of ttt_linear is no measure: torch's third derivative of a layer norm
    is off.
    """

    def penalty(inputs):
        inputs = {n: x.detach().requires_grad_() for n, x in inputs.items()}
        loss = on(op, None)(inputs).square().mean()
        grads = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
        return sum(g.square().sum() for g in grads), inputs

    start = op.make(HW)
    total, inputs = penalty(start)
    actual = torch.autograd.grad(total, list(inputs.values()))
    for (name, x), grad in zip(start.items(), actual, strict=True):
        step = 1e-6 * torch.randn_like(x)
        ahead, behind = (penalty({**start, name: x + s * step})[0] for s in (1, -1))
        # Central differences: about ε² = 1e-12, and roundings of 1e-16/ε.
        expected, size = (ahead - behind) / 2, (grad * step).abs().sum()
        assert ((grad * step).sum() - expected).abs() < 1e-5 * size, name


@every_op
def test_gradients_with_a_graph_are_the_same(op):
    """Also those of inputs that depend on each other."""
    start = {n: x.requires_grad_() for n, x in op.make(HW).items()}
    inputs, before = {}, 0
    for name, x in start.items():
        inputs[name] = x + before
        before = inputs[name].mean()
    loss = on(op, 'reference')(inputs).square().sum()
    leaves = list(start.values())
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    actual = torch.autograd.grad(loss, leaves, create_graph=True)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings('ignore:There is a performance drop')  # torch says that it loops
@every_backend
def test_gradients_through_vmap(op, backend):
    inputs = op.make(HW, dtype=FP32, dim=16)
    stacked = {n: torch.stack([x, x.flip(1)]).requires_grad_() for n, x in inputs.items()}
    leaves = list(stacked.values())
    output = torch.func.vmap(on(op, backend))(stacked)
    actual = torch.autograd.grad(output.square().sum(), leaves)
    outputs = [on(op, backend)({n: x[i] for n, x in stacked.items()}) for i in (0, 1)]
    expected = torch.autograd.grad(torch.stack(outputs).square().sum(), leaves)
    assert torch.equal(output, torch.stack(outputs))
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    'transform',
    [
        lambda f, x, _: torch.func.grad(f)(x),
        lambda f, x, _: torch.func.vmap(torch.func.grad(f))(x[None])[0],
        lambda f, x, _: torch.func.grad(lambda y: torch.func.vmap(f)(y[None]).sum())(x),
        lambda f, x, tangent: torch.func.jvp(f, (x,), (tangent,))[1],
    ],
    ids=['grad', 'vmap of grad', 'grad of vmap', 'jvp'],
)
@every_op
def test_derivatives_of_torch_func(op, transform):
    """They go by the definition: registered ops have no rule for them."""
    inputs = op.make(HW)
    name = op.images[0]
    x, tangent = inputs[name], torch.randn_like(inputs[name])

    def loss(x):
        return on(op, 'reference')({**inputs, name: x}).square().sum()

    actual = transform(loss, x, tangent)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x)
    expected = grad if actual.dim() else (grad * tangent).sum()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# -------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ('op', 'case'),
    [pytest.param(o, c, id=f'{n}-{i}') for n, o in OPS.items() for i, c in enumerate(o.bad)],
)
def test_a_bad_argument_is_named(op, case):
    inputs, options = op.make(HW, dtype=FP32), {'hw': HW}
    for name, change in case.changes.items():
        if name in inputs:
            inputs[name] = change(inputs[name])
        else:
            options[name] = change
    with pytest.raises(case.kind, match=case.word):
        op.call(inputs, **options)


@pytest.mark.parametrize(
    ('op', 'name'),
    [pytest.param(o, name, id=f'{n}-{name}') for n, o in OPS.items() for name in o.make(HW)],
)
def test_every_input_is_checked(op, name):
    inputs, first, record = op.make(HW, dtype=FP32), op.tokens[0], _op.OPS[op.name]
    x = inputs[name]
    bad = [(x[0], ValueError), (x.int(), TypeError), (0.0, TypeError)]
    if name != first:
        bad += [(x[..., :-1], ValueError), (x.half(), TypeError), (x.to('meta'), ValueError)]
    if name not in [record.names[i] for i in record.optional]:
        bad += [(None, TypeError)]
    for value, kind in bad:
        with pytest.raises(kind, match=f'^{op.name}: '):
            op.call({**inputs, name: value}, HW)


# ------------------------------------------------------------------------------------------ numba


@on_numba
def test_numba_is_what_a_cpu_runs(op, monkeypatch):
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)
    inputs = op.make((9, 13), dim=32, dtype=FP32)
    kernel = _backend.load_kernel(op.name, 'numba')
    forward = Mock(wraps=kernel.forward)
    monkeypatch.setattr(kernel, 'forward', forward)
    assert torch.equal(on(op, None)(inputs, (9, 13)), on(op, 'numba')(inputs, (9, 13)))
    assert forward.call_count == 2


@on_numba
def test_the_same_bits_with_any_number_of_threads(op, monkeypatch):
    monkeypatch.setattr('ttt_kernels._numba._WORTH_A_THREAD', 1)
    hw = (9, 13)
    inputs = op.make(hw, batch=3, dim=48, dtype=FP32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            output, grads = with_gradients(on(op, 'numba'), inputs, hw)
            results.append((output, *grads.values()))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(others, results[0], strict=True))


@pytest.mark.parametrize(
    'op', [marked(o, name=n, backend='numba') for n, o in HAVE_NUMBA.items() if 'ttt' in n]
)
def test_parameters_can_still_be_resized(op):
    # FSDP does so with parameters that it has gathered; NumPy's views forbid it.
    inputs = op.make(HW, dim=16, dtype=FP32)
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    on(op, 'numba')(leaves).sum().backward()
    parameters = [x for n, x in inputs.items() if n not in op.images]
    assert all(x.untyped_storage().resizable() for x in parameters)


# ---------------------------------------------------------------------------------- the short way


@every_op
def test_eager_calls_and_the_registered_op_agree(op, monkeypatch):
    inputs, record = op.make(HW, dtype=FP32), _op.OPS[op.name]
    registered = Mock(wraps=record.registered)
    monkeypatch.setattr(record, 'registered', registered)
    actual = with_gradients(on(op, 'reference'), inputs)
    assert registered.call_count == 0
    # As with a torch that lacks one of the private functions.
    monkeypatch.setattr(_op, '_probes', None)
    expected = with_gradients(on(op, 'reference'), inputs)
    assert registered.call_count == 1
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(g, expected[1][n]) for n, g in actual[1].items())


def test_a_torch_without_a_private_function(monkeypatch):
    assert _op._find_probes() is not None
    monkeypatch.delattr(torch._C, '_len_torch_dispatch_stack')
    assert _op._find_probes() is None


@every_op
def test_an_input_with_a_pending_negation(op):
    inputs = op.make(HW, dtype=FP32)
    name = op.tokens[0]
    expected = on(op, None)({**inputs, name: -inputs[name]})
    view = torch.complex(torch.zeros_like(inputs[name]), inputs[name]).conj().imag
    assert view.is_neg()
    assert torch.equal(on(op, None)({**inputs, name: view}), expected)


def test_a_bad_option_is_refused_after_an_equal_one():
    inputs = OPS['ttt_glu'].make(HW, dtype=FP32)
    on(OPS['ttt_glu'], None)(inputs, damping=True)
    with pytest.raises(TypeError, match='damping'):
        on(OPS['ttt_glu'], None)(inputs, damping=1)
    inputs = OPS['ttt_dwconv'].make(HW, dtype=FP32)
    on(OPS['ttt_dwconv'], None)(inputs)
    with pytest.raises(TypeError, match=r'hw.*\(3.0, 5\)'):
        on(OPS['ttt_dwconv'], None)(inputs, (3.0, 5))


def test_plans_are_bounded_and_made_once(monkeypatch):
    op, record = OPS['ttt_glu'], _op.OPS['ttt_glu']
    record.plans.clear()
    monkeypatch.setattr(_op, 'MOST_PLANS', 3)
    with monkeypatch.context() as patch:
        check = Mock(wraps=record.check)
        patch.setattr(record, 'check', check)
        for h in (1, 2, 3, 3, 2, 1):
            on(op, None)(op.make((h, 2), dtype=FP32), (h, 2))
        assert check.call_count == 3
    for h in range(1, 9):
        on(op, None)(op.make((h, 2), dtype=FP32), (h, 2))
        assert len(record.plans) <= 3


def test_a_backward_pass_is_counted_where_the_forward_pass_was_not():
    op = OPS['ttt_glu']
    output = on(op, None)({n: x.requires_grad_() for n, x in op.make(HW, dtype=FP32).items()})
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_flop_counts()['Global'][torch.ops.ttt_kernels.ttt_glu_backward] > 0


# ------------------------------------------------------------------------------------ single ops

# FLOPs of both passes on two images of 15 tokens: heads have 6 channels, mini-batches 15 tokens.
PRODUCTS = 2 * 2 * 15 * 2 * 36
SAMPLES = 2 * 9 * 3 * 2 * 4
FLOPS = [
    ('ttt_linear', {}, 2 * PRODUCTS * 3 + 8 * 15 * 90 * 4, 2 * PRODUCTS * 8 + 8 * 15 * 90 * 12),
    ('causal_conv', {}, 2 * 4 * 2 * 360, 2 * 2 * 4 * 2 * 360),
    ('ttt_glu', {}, PRODUCTS * 6, PRODUCTS * 16),
    ('ttt_dwconv', {}, 2 * 2 * 15 * 18 * 6, 2 * 2 * 15 * 36 * 6),
    ('ttt_mlp', {}, PRODUCTS * 6, PRODUCTS * 15),
    ('ttt_mlp', {'loss': 'l2'}, PRODUCTS * 7, PRODUCTS * 18),
    ('ttt_mlp SwiGLU', {}, PRODUCTS * 9, PRODUCTS * 23),
    ('ttt_mlp SwiGLU', {'loss': 'l2'}, PRODUCTS * 10, PRODUCTS * 26),
    ('deform_attn', {}, 2 * 4 * SAMPLES * 5, 2 * 2 * 4 * SAMPLES * 5),
]


@pytest.mark.parametrize(('name', 'options', 'forward', 'backward'), FLOPS)
def test_flops_follow_the_formula(name, options, forward, backward):
    op = OPS[name]
    inputs = {n: x.requires_grad_() for n, x in op.make(HW).items()}
    with FlopCounterMode(display=False) as counter:
        on(op, 'reference')(inputs, **options).sum().backward()
    counts = counter.get_flop_counts()['Global']
    packets = (getattr(torch.ops.ttt_kernels, op.name + x) for x in ('', '_backward'))
    assert [counts[packet] for packet in packets] == [forward, backward]


def test_one_unused_output_of_causal_conv():
    leaves = [x.requires_grad_() for x in OPS['causal_conv'].make(HW).values()]
    for used in (0, 1):
        actual = causal_conv(*leaves, backend='reference')[used]
        expected = causal_conv(leaves[0], leaves[1 + used], backend='reference')[0]
        actual, expected = (
            torch.autograd.grad(y.sum(), (leaves[0], leaves[1 + used])) for y in (actual, expected)
        )
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_deform_attn_without_queries():
    op = OPS['deform_attn']
    output, grads = with_gradients(on(op, 'reference'), op.make(HW, queries=0))
    assert output.shape == (2, 0, 15)
    assert grads['value'].eq(0).all()


def test_deform_attn_with_all_inputs_in_half_precision():
    op = OPS['deform_attn']
    inputs = {n: x.bfloat16() for n, x in op.make(HW).items()}
    output, grads = with_gradients(on(op, 'reference'), inputs)
    assert {output.dtype, *(g.dtype for g in grads.values())} == {BF16}
    exact = {n: x.double() for n, x in inputs.items()}
    assert error(output, op.definition(exact, hw=HW)) < 1e-2


# ------------------------------------------------------------------------------------ inner steps

# The option that changes the inner step, at its other value.
OTHER = {'ttt_glu': {'damping': False}, 'ttt_dwconv': {'damping': False}, 'ttt_mlp': {'loss': 'l2'}}
every_step = pytest.mark.parametrize('op', STEPS.values(), ids=STEPS)


@every_step
def test_the_step_matters_and_has_the_published_scale(op):
    inputs = op.make((4, 4))
    actual = op.call(inputs, (4, 4), scale=1 / 3)
    if op.name != 'ttt_mlp':  # which has no default
        size = {'hw': (4, 4)} if op.name == 'ttt_dwconv' else {}
        function = getattr(ttt_kernels, op.name)
        assert torch.equal(function(**inputs, **size, backend='reference'), actual)
    assert error(actual, op.call(inputs, (4, 4), scale=0.0)) > 1e-2
    assert error(actual, op.call(inputs, (4, 4), scale=1 / 3, **OTHER[op.name])) > 1e-3


@every_step
def test_an_empty_batch_has_a_derivative_of_torch_func(op):
    inputs = op.make((3, 5), batch=0)
    grad = torch.func.grad(lambda q: op.call({**inputs, 'q': q}, (3, 5)).sum())(inputs['q'])
    assert grad.shape == inputs['q'].shape


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@every_step
def test_a_detection_sized_map_does_not_underflow(op, dtype):
    # 66 800 tokens: v/N in half precision has lost everything below 6e-8·N, or most of its bits.
    hw = (200, 334)
    inputs = op.make(hw, dim=4, batch=1, dtype=dtype)
    exact = {n: x.double() for n, x in inputs.items()}
    expected = inner_gradient(op, exact, hw, 'reference')

    def off(g):
        return ((g - expected).norm() / expected.norm()).item()

    # fp32 sums of 66 800 terms that nearly cancel.
    assert off(inner_gradient(op, inputs, hw, None)) < 4e-4
    scaled = (exact['v'] / math.prod(hw)).half().double() * math.prod(hw)
    assert off(inner_gradient(op, {**exact, 'v': scaled}, hw, 'reference')) > 4e-4
