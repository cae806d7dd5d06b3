"""ttt_glu, ttt_dwconv and ttt_mlp on the CPU: definition, formulas, registration."""

import importlib
import math

import pytest
import torch
from inner_steps import (
    CASES,
    FP64,
    SCALE,
    call_dwconv,
    call_glu,
    make_dwconv,
    make_glu,
)
from kernel_testing import assert_same, error, normal, with_gradients
from torch.utils.flop_counter import FlopCounterMode

import ttt_kernels
from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp
from ttt_kernels._inner_step import damped, damped_backward


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


# ------------------------------------------------------------------------------------- definition


@pytest.mark.parametrize('other', [False, True])
@pytest.mark.parametrize(
    'hw', [(1, 1), (1, 7), (7, 1), (3, 5), (7, 9), (9, 13), (14, 14), (60, 70)]
)
def test_explicit_formulas_equal_the_definition_with_every_gradient(case, hw, other):
    inputs = case.make(hw, dim=3 if math.prod(hw) > 1000 else 6)
    options = case.other if other else {}
    expected = with_gradients(case.primal, inputs, hw, **options)
    found = with_gradients(case.call, inputs, hw, **options)
    assert found[1].keys() == inputs.keys()
    assert_same(found, expected, FP64)


@pytest.mark.parametrize('dim', [1, 2, 32])
def test_any_head_dim(case, dim):
    inputs = case.make((5, 3), dim=dim)
    expected = with_gradients(case.primal, inputs, (5, 3))
    assert_same(with_gradients(case.call, inputs, (5, 3)), expected, FP64)


def test_the_step_matters_and_has_the_published_scale(case):
    inputs = case.make((4, 4))
    found = case.call(inputs, (4, 4), scale=1 / 3)
    assert error(found, case.primal(inputs, (4, 4), scale=1 / 3)) < FP64
    if case.name != 'ttt_mlp':  # which has no default
        size = {'hw': (4, 4)} if case.name == 'ttt_dwconv' else {}
        function = getattr(ttt_kernels, case.name)
        assert torch.equal(function(**inputs, **size, backend='reference'), found)
    assert error(found, case.call(inputs, (4, 4), scale=0.0)) > 1e-2
    assert error(found, case.call(inputs, (4, 4), scale=1 / 3, **case.other)) > 1e-3


def test_glu_step_is_the_papers_by_hand():
    inputs = make_glu((5, 1), batch=1, heads=1)
    q, k, v = (inputs[n][0, :, 0] for n in 'qkv')
    w1, w2 = inputs['w1'][0], inputs['w2'][0]
    z1, z2 = k @ w1, k @ w2
    sigma = torch.sigmoid(z2)
    e = -SCALE * v / 5
    g1 = k.T @ (e * z2 * sigma)
    g2 = k.T @ (e * z1 * (sigma + z2 * sigma * (1 - sigma)))
    w1, w2 = (w - g / (g.square().sum(0).sqrt() + 1) for w, g in ((w1, g1), (w2, g2)))
    u2 = q @ w2
    expected = (q @ w1) * u2 * torch.sigmoid(u2)
    assert error(call_glu(inputs, (5, 1))[0, :, 0], expected) < FP64


def test_dwconv_step_is_nine_shifted_products_by_hand():
    h, w = 3, 4
    inputs = make_dwconv((h, w), batch=1, dim=2)
    q, k, v = (inputs[n][0].view(h, w, 2) for n in 'qkv')
    new = torch.empty(2, 3, 3, dtype=torch.float64)
    for c in range(2):
        g = torch.zeros(3, 3, dtype=torch.float64)
        for y in range(h):
            for x in range(w):
                for i in range(3):
                    for j in range(3):
                        if 0 <= y + i - 1 < h and 0 <= x + j - 1 < w:
                            g[i, j] -= SCALE / 12 * v[y, x, c] * k[y + i - 1, x + j - 1, c]
        new[c] = inputs['w3'][c] - g / (g.square().sum().sqrt() + 1)
    expected = torch.nn.functional.conv2d(
        q.permute(2, 0, 1)[None], new[:, None], padding=1, groups=2
    )
    found = call_dwconv(inputs, (h, w)).view(h, w, 2).permute(2, 0, 1)
    assert error(found, expected[0]) < FP64


# T = 4, d = 2, s = 1/√2, computed apart from this code.
WORKED = {
    ('swiglu', 'dot'): [
        [-2.9105474636, 4.4988783353],
        [0.1638725521, -0.5881973433],
        [-25.5564897589, 41.4480488164],
        [-0.0199421740, -1.6857320936],
    ],
    ('mlp', 'dot'): [
        [0.4919172649, 0.1926560139],
        [-0.2291787200, 0.9917061632],
        [0.5905592015, 0.4018537771],
        [-0.1607894912, -0.0656393197],
    ],
    ('mlp', 'l2'): [
        [0.2055936054, -0.2209775298],
        [0.0708955164, 0.4165132079],
        [0.2071032207, -0.2566177378],
        [-0.3891973219, 0.1459970073],
    ],
}


@pytest.mark.parametrize('which', WORKED, ids='-'.join)
def test_mlp_step_has_the_digits_of_the_worked_example(which):
    q, k, v, w1, w2, w3 = (
        torch.tensor(x, dtype=torch.float64)
        for x in (
            [[0.5, 1], [-1, 1], [2, 0], [0, -1]],
            [[1, -1], [0.5, 2], [-1.5, 0], [2, 1]],
            [[1, 0], [0, -2], [1, 1], [-1, 3]],
            [[0.5, -1], [1, 0.25]],
            [[1, 0.5], [-0.5, 1]],
            [[-1, 0.5], [0.25, 2]],
        )
    )
    weights = (w1, w2, w3) if which[0] == 'swiglu' else (w1, w2)
    found = ttt_mlp(
        *(x[None, :, None] for x in (q, k, v)),
        *(w[None] for w in weights),
        loss=which[1],
        scale=2**-0.5,
    )
    expected = torch.tensor(WORKED[which], dtype=torch.float64)
    torch.testing.assert_close(found[0, :, 0], expected, rtol=0, atol=6e-11)


def test_images_do_not_see_each_other(case):
    inputs = case.make((3, 5), batch=3)
    one = {n: x[1:2] if n in 'qkv' else x for n, x in inputs.items()}
    assert error(case.call(one, (3, 5)), case.call(inputs, (3, 5))[1:2]) < FP64


@pytest.mark.parametrize('name', ['glu', 'mlp', 'swiglu'])
def test_tokens_have_no_order(name):
    case = CASES[name]
    inputs = case.make((19, 1))
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    shuffled = {n: x[:, order] if n in 'qkv' else x for n, x in inputs.items()}
    assert error(case.call(shuffled, (19, 1)), case.call(inputs, (19, 1))[:, order]) < FP64


@pytest.mark.parametrize('zero', ['q', 'k', 'v'])
def test_a_zero_gradient_has_a_derivative(case, zero):
    # ‖g‖ = 0 for k = 0 or v = 0: the damping is the identity there, and nothing is divided by 0.
    inputs = case.make((3, 3))
    inputs[zero] = torch.zeros_like(inputs[zero])
    expected = with_gradients(case.primal, inputs, (3, 3))
    assert all(g.isfinite().all() for g in expected[1].values())
    assert_same(with_gradients(case.call, inputs, (3, 3)), expected, FP64)


def test_damping_and_its_derivative():
    generator = torch.Generator().manual_seed(0)
    g, grad = normal(generator, 4, 5), normal(generator, 4, 5)
    g[:, 2] = 0
    _, pullback = torch.func.vjp(lambda x: damped(x, 0), g)
    torch.testing.assert_close(damped_backward(grad, g, 0), pullback(grad)[0], rtol=0, atol=1e-15)
    assert (damped(1e6 * g, 0).norm(dim=0) < 1).all()


# -------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [
        # Unit roundoff 6e-8 in sums of 196 terms.
        (torch.float32, 5e-6),
        # Unit roundoffs 2⁻¹¹ and 2⁻⁸ of the output alone: everything inside is fp32.
        (torch.float16, 6e-4),
        (torch.bfloat16, 5e-3),
    ],
)
def test_low_precision_stays_close_to_fp64(case, dtype, tolerance):
    inputs = case.make((14, 14), dim=16, dtype=dtype)
    output, grads = with_gradients(case.call, inputs, (14, 14))
    assert output.dtype == dtype
    assert {n: g.dtype for n, g in grads.items()} == {n: x.dtype for n, x in inputs.items()}
    exact = {n: x.double() for n, x in inputs.items()}
    # The gradient of the output is rounded to its dtype too.
    grad = normal(torch.Generator().manual_seed(1), *output.shape).to(dtype).double()
    leaves = {n: x.requires_grad_() for n, x in exact.items()}
    expected = case.call(leaves, (14, 14))
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), grad)
    expected_grads = dict(zip(leaves, expected_grads, strict=True))
    assert_same((output, grads), (expected.detach(), expected_grads), tolerance)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_a_detection_sized_map_does_not_underflow(case, dtype):
    # 66 800 tokens: v/N in half precision has lost everything below 6e-8·N, or most of its bits.
    hw = (200, 334)
    inputs = case.make(hw, dim=4, batch=1, dtype=dtype)
    rest = case.rest(hw, 1 / 3)
    _, g = case.op(*case.tensors(inputs), *rest)
    exact = {n: x.double() for n, x in inputs.items()}
    _, expected = case.op(*case.tensors(exact), *rest)
    relative = ((g - expected).norm() / expected.norm()).item()
    # fp32 sums of 66 800 terms that nearly cancel.
    assert relative < 4e-4
    scaled = (exact['v'] / math.prod(hw)).half().double() * math.prod(hw)
    _, underflown = case.op(*case.tensors({**exact, 'v': scaled}), *rest)
    assert ((underflown - expected).norm() / expected.norm()).item() > 4e-4


# --------------------------------------------------------------------------------- memory layouts


@pytest.mark.parametrize('layout', ['contiguous', 'reversed', 'expanded'])
def test_any_strides(case, layout):
    inputs = case.make((3, 5))
    if layout == 'expanded':
        inputs = {n: x[:1].expand(x.shape) if n in 'qkv' else x for n, x in inputs.items()}
    dense = {n: x.contiguous() for n, x in inputs.items()}
    if layout == 'reversed':
        turn = tuple(range(inputs['q'].dim()))[::-1]
        inputs = {
            n: x.permute(turn).contiguous().permute(turn) if n in 'qkv' else x
            for n, x in inputs.items()
        }
    output = case.call(inputs, (3, 5))
    assert output.is_contiguous()
    torch.testing.assert_close(output, case.call(dense, (3, 5)), rtol=0, atol=1e-13)


@pytest.mark.parametrize('layout', ['expanded', 'permuted'])
def test_strided_and_expanded_gradients(case, layout):
    inputs = {n: x.requires_grad_() for n, x in case.make((3, 5)).items()}
    output = case.call(inputs, (3, 5))
    grad = torch.ones((), dtype=torch.float64).expand(output.shape)
    if layout == 'permuted':
        grad = normal(torch.Generator().manual_seed(2), *output.shape[::-1]).permute(
            tuple(range(output.dim()))[::-1]
        )
    leaves = list(inputs.values())
    found = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    expected = torch.autograd.grad(output, leaves, grad.contiguous())
    for name, x, y in zip(inputs, found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13, msg=name)


def test_no_output_depends_on_fresh_memory(case):
    inputs = case.make((3, 5), dtype=torch.bfloat16)
    expected = with_gradients(case.call, inputs, (3, 5))
    # torch then fills every torch.empty with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = with_gradients(case.call, inputs, (3, 5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, expected, FP64)


class NoGradient(torch.autograd.Function):
    """The identity, whose input gets no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_an_output_that_gets_no_gradient(case):
    inputs = {n: x.requires_grad_() for n, x in case.make((3, 5)).items()}
    NoGradient.apply(case.call(inputs, (3, 5))).sum().backward()
    assert all(x.grad is None for x in inputs.values())


def test_inputs_are_left_alone(case):
    inputs = case.make((3, 5))
    copies = {n: x.clone() for n, x in inputs.items()}
    with_gradients(case.call, inputs, (3, 5))
    tensors, rest = case.tensors(inputs), case.rest((3, 5))
    output, g = case.op(*tensors, *rest)
    case.op_backward(output, *tensors, g, *rest)
    assert all(torch.equal(inputs[n], x) for n, x in copies.items())


# ----------------------------------------------------------------------------------- registration


def test_opcheck(case):
    inputs, rest = case.make((3, 5), dtype=torch.float32), case.rest((3, 5))
    output, g = case.op(*case.tensors(inputs), *rest)
    backward = (output + 1, *case.tensors(inputs), g, *rest)
    torch.library.opcheck(case.op_backward.default, backward)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    torch.library.opcheck(case.op.default, (*case.tensors(leaves), *rest))


def test_meta_tensors_have_the_shapes_of_real_ones(case):
    inputs, rest = case.make((3, 5), dtype=torch.bfloat16), case.rest((3, 5))
    on_meta = {n: x.to('meta') for n, x in inputs.items()}
    real = case.op(*case.tensors(inputs), *rest)
    meta = case.op(*case.tensors(on_meta), *rest)
    for x, y in zip(real, meta, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    real = case.op_backward(real[0], *case.tensors(inputs), real[1], *rest)
    meta = case.op_backward(meta[0], *case.tensors(on_meta), meta[1], *rest)
    for x, y in zip(real, meta, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_compiles_into_one_graph(case):
    inputs = case.make((3, 5), dtype=torch.float32)
    # Inductor needs a compiler on the machine and treats a registered op the same way.
    compiled = torch.compile(case.call, fullgraph=True, backend='aot_eager')
    expected = with_gradients(case.call, inputs, (3, 5))
    assert_same(with_gradients(compiled, inputs, (3, 5)), expected, 1e-6)


class All(torch.nn.Module):
    """The two branches of ViT³'s mixer, and T⁵'s models behind, on maps of any size."""

    def forward(self, x, w1, w2, w3):
        height, width = x.shape[1:3]
        tokens = x.flatten(1, 2)
        heads = tokens.unflatten(-1, (3, 2, 4))
        gated = ttt_glu(*heads.unbind(2), w1, w2)
        filtered = ttt_dwconv(*tokens.chunk(3, -1), w3, hw=(height, width))
        layers = ttt_mlp(*heads.unbind(2), w2, w1, scale=0.5)
        layers = ttt_mlp(layers, layers, gated, w1, w2, w2, loss='l2', scale=0.5)
        return layers.flatten(2) + filtered


def test_exports_with_any_map_size():
    generator = torch.Generator().manual_seed(0)
    weights = tuple(normal(generator, *s).float() for s in ((2, 4, 4), (2, 4, 4), (8, 3, 3)))
    image = normal(generator, 2, 6, 5, 24).float()
    sizes = {
        1: torch.export.Dim('height', min=2, max=64),
        2: torch.export.Dim('width', min=2, max=64),
    }
    program = torch.export.export(
        All(), (image, *weights), dynamic_shapes=(sizes, None, None, None)
    )
    targets = {node.target for node in program.graph.nodes}
    assert {case.op.default for case in CASES.values()} <= targets
    larger = normal(generator, 2, 9, 13, 24).float()
    found = program.module()(larger, *weights)
    torch.testing.assert_close(found, All()(larger, *weights))


@pytest.mark.parametrize('compiled', [False, True])
def test_autocast_rounds_the_tokens_and_nothing_else(case, compiled):
    inputs = case.make((3, 5), dtype=torch.float32)

    def under_autocast(x, hw):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            return case.call(x, hw)

    rounded = {n: x.bfloat16() if n in 'qkv' else x for n, x in inputs.items()}
    function = under_autocast
    if compiled:
        function = torch.compile(under_autocast, fullgraph=True, backend='aot_eager')
    output, grads = with_gradients(function, inputs, (3, 5))
    expected, expected_grads = with_gradients(case.call, rounded, (3, 5))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name].float()), name


def test_autocast_leaves_fp64_alone(case):
    inputs = case.make((3, 5))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        found = case.call(inputs, (3, 5))
    assert torch.equal(found, case.call(inputs, (3, 5)))


def test_a_second_derivative_is_an_error(case):
    inputs = {n: x.requires_grad_() for n, x in case.make((3, 3)).items()}
    loss = case.call(inputs, (3, 3)).square().sum()
    (dq,) = torch.autograd.grad(loss, inputs['q'], create_graph=True)
    with pytest.raises(RuntimeError, match='autograd'):
        torch.autograd.grad(dq.sum(), inputs['k'])


def count(case, hw, **options):
    inputs = {n: x.requires_grad_() for n, x in case.make(hw, dim=8).items()}
    with FlopCounterMode(display=False) as counter:
        case.call(inputs, hw, **options).sum().backward()
    counts = counter.get_flop_counts()['Global']
    return counts[case.op], counts[case.op_backward]


def test_flops_follow_the_formula():
    products = 2 * 2 * 15 * 2 * 64
    assert count(CASES['glu'], (3, 5)) == (products * 6, products * 16)
    for loss, counts in {'dot': [(6, 15), (9, 23)], 'l2': [(7, 18), (10, 26)]}.items():
        for name, (forward, backward) in zip(('mlp', 'swiglu'), counts, strict=True):
            found = count(CASES[name], (3, 5), loss=loss)
            assert found == (products * forward, products * backward), (name, loss)
    assert count(CASES['dwconv'], (3, 5)) == (2 * 2 * 15 * 18 * 8, 2 * 2 * 15 * 36 * 8)


def test_flops_are_linear_in_the_tokens(case):
    forward, backward = count(case, (3, 5))
    assert count(case, (6, 20)) == (8 * forward, 8 * backward)


# -------------------------------------------------------------------------------------- bad input


def changed(**changes):
    return lambda x: {n: changes[n](t) if n in changes else t for n, t in x.items()}


ANY = {
    'k': (changed(k=lambda x: x[:, :4]), {}, ValueError, r'k must have shape \(B, '),
    'v': (changed(v=lambda x: x[..., :4]), {}, ValueError, r'v must have shape \(B, '),
    'dimensions': (changed(q=lambda x: x[0]), {}, ValueError, r'q must have shape.*got \d dim'),
    'token dtype': (
        changed(q=lambda x: x.int(), k=lambda x: x.int(), v=lambda x: x.int()),
        {},
        TypeError,
        r'q must be float32, bfloat16, float16 or float64, got torch.int32',
    ),
    'mixed dtypes': (
        changed(k=lambda x: x.half()),
        {},
        TypeError,
        r'k must be torch.float32 as q is',
    ),
    'not a tensor': (changed(v=lambda x: 0.0), {}, TypeError, r'v must be a tensor, got float'),
    'nothing': (changed(q=lambda x: None), {}, TypeError, r'q must be a tensor, got NoneType'),
    'devices': (
        changed(v=lambda x: x.to('meta')),
        {},
        ValueError,
        r'v is on meta and q on cpu; move',
    ),
    'backend': (
        changed(),
        {'backend': 'cuda'},
        ValueError,
        r"backend must be None, 'triton', 'numba' or 'reference', got 'cuda'",
    ),
}
BAD = {
    **{('glu', name): case for name, case in ANY.items()},
    **{('dwconv', name): case for name, case in ANY.items()},
    **{('swiglu', name): case for name, case in ANY.items()},
    ('glu', 'no tokens'): (
        changed(q=lambda x: x[:, :0], k=lambda x: x[:, :0], v=lambda x: x[:, :0]),
        {},
        ValueError,
        r'N must be at least 1.*\(2, 0, 2, 6\)',
    ),
    ('glu', 'w1'): (
        changed(w1=lambda x: x[:1]),
        {},
        ValueError,
        r'w1 must have shape \(H, d, d\) = \(2, 6, 6\)',
    ),
    ('glu', 'w2'): (changed(w2=lambda x: x[0]), {}, ValueError, r'w2 must have shape'),
    ('glu', 'w2 dtype'): (
        changed(w2=lambda x: x.half()),
        {},
        TypeError,
        r'w2 must be torch.float32 where q is',
    ),
    ('mlp', 'w2'): (changed(w2=lambda x: x[0]), {}, ValueError, r'w2 must have shape'),
    ('swiglu', 'w3'): (
        changed(w3=lambda x: x[:, :4]),
        {},
        ValueError,
        r'w3 must have shape \(H, d, d\) = \(2, 6, 6\), got \(2, 4, 6\)',
    ),
    ('swiglu', 'w3 dtype'): (
        changed(w3=lambda x: x.half()),
        {},
        TypeError,
        r'w3 must be torch.float32 where q is',
    ),
    ('mlp', 'loss'): (
        changed(),
        {'loss': 'l1'},
        ValueError,
        r"loss must be 'dot' or 'l2', got 'l1'",
    ),
    ('mlp', 'scale'): (
        changed(),
        {'scale': float('nan')},
        ValueError,
        r'scale must be a finite number, got nan',
    ),
    ('dwconv', 'w3'): (
        changed(w3=lambda x: x[:, None]),
        {},
        ValueError,
        r'w3 must have shape \(d, 3, 3\) = \(6, 3, 3\), got \(6, 1, 3, 3\)',
    ),
    ('dwconv', 'w3 dtype'): (
        changed(w3=lambda x: x.double()),
        {},
        TypeError,
        r'w3 must be torch.float32 where q is',
    ),
    ('dwconv', 'another map'): (
        changed(),
        {'hw': (4, 5)},
        ValueError,
        r'hw = \(4, 5\) makes 20 pixels, and q has 15',
    ),
    ('dwconv', 'an empty map'): (
        changed(),
        {'hw': (0, 15)},
        ValueError,
        r'hw must be at least \(1, 1\), got \(0, 15\)',
    ),
    ('dwconv', 'one number'): (changed(), {'hw': 15}, TypeError, r'hw must be two ints.*got 15'),
    ('dwconv', 'halves'): (
        changed(),
        {'hw': (2.5, 6)},
        TypeError,
        r'hw must be two ints.*\(2.5, 6\)',
    ),
}


@pytest.mark.parametrize('which', BAD, ids='-'.join)
def test_bad_input_is_named(which):
    change, options, kind, message = BAD[which]
    name = which[0]
    inputs = change(CASES[name].make((3, 5), dtype=torch.float32))
    with pytest.raises(kind, match=message):
        CASES[name].call(inputs, **{'hw': (3, 5), **options})


def test_an_empty_batch_is_empty(case):
    inputs = {n: x.requires_grad_() for n, x in case.make((3, 5), batch=0).items()}
    output = case.call(inputs, (3, 5))
    output.sum().backward()
    assert output.shape == inputs['q'].shape
    assert all((x.grad == 0).all() for x in inputs.values())


def test_triton_without_a_gpu_says_why(case, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run here: .*backend=None"):
        case.call(case.make((3, 5), dtype=torch.float32), (3, 5), backend='triton')


def test_reference_can_be_forced(case):
    inputs = case.make((3, 5))
    reference = importlib.import_module(f'ttt_kernels.{case.name}.reference')
    output, _ = reference.forward(*case.tensors(inputs), *case.rest((3, 5))[:-1])
    assert torch.equal(case.call(inputs, (3, 5), backend='reference'), output)
