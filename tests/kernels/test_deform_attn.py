"""ttt_kernels.deform_attn on the CPU: definition, gradients, registration, errors."""

import pytest
import torch
from kernel_testing import assert_same, error, with_gradients
from sampling import NAMES, PYRAMID, call, call_fused, definition, fused, make, unfused
from torch.utils.flop_counter import FlopCounterMode

from ttt_kernels import deform_attn, deform_attn_fused

OP = torch.ops.ttt_kernels.deform_attn
OP_BACKWARD = torch.ops.ttt_kernels.deform_attn_backward
# fp64 has 16 digits, sums of at most some hundred terms.
FP64 = 1e-12


@pytest.mark.parametrize(
    'shapes', [PYRAMID, ((1, 1),), ((6, 6),), ((1, 9), (9, 1)), ((8, 6), (4, 3), (2, 2))]
)
@pytest.mark.parametrize(('queries', 'points'), [(1, 1), (9, 4), (17, 3)])
def test_output_and_every_gradient_follow_the_definition(shapes, queries, points):
    inputs = make(shapes, queries, points=points)
    expected = with_gradients(lambda x: definition(x, shapes), inputs)
    assert_same(with_gradients(lambda x: call(x, shapes), inputs), expected, FP64)


@pytest.mark.parametrize('shared', [True, False])
@pytest.mark.parametrize(
    ('shapes', 'queries', 'points'), [(PYRAMID, 9, 4), (((1, 1),), 1, 1), (((6, 6),), 17, 3)]
)
def test_fused_is_softmax_and_places_and_deform_attn(shapes, queries, points, shared):
    inputs = fused(make(shapes, queries, points=points), shapes, shared)
    expected = with_gradients(lambda x: unfused(x, shapes), inputs)
    found = with_gradients(lambda x: call_fused(x, shapes), inputs)
    assert_same(found, expected, FP64)


def test_gradcheck():
    shapes = ((3, 4), (1, 2))
    inputs = fused(make(shapes, 2, batch=1, heads=1, dim=2, points=2), shapes)
    leaves = [x.requires_grad_() for x in inputs.values()]
    value, reference_points, offsets, logits = leaves
    assert torch.autograd.gradcheck(
        lambda v, r, o, g: deform_attn_fused(v, shapes, r, o, g),
        (value, reference_points, offsets, logits),
    )


def test_sizes_in_a_tensor_are_those_in_numbers():
    inputs = make()
    expected = with_gradients(call, inputs)
    for dtype in (torch.int64, torch.int32):
        found = with_gradients(lambda x, d=dtype: call(x, torch.tensor(PYRAMID, dtype=d)), inputs)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][n], expected[1][n]) for n in NAMES)


def test_no_queries_give_nothing():
    inputs = make(queries=0)
    output, grads = with_gradients(call, inputs)
    assert output.shape == (2, 0, 15)
    assert grads['value'].eq(0).all()


def test_pixel_centres_read_the_pixel():
    value = torch.arange(12.0).view(1, 12, 1, 1)
    x, y = torch.meshgrid((torch.arange(4) + 0.5) / 4, (torch.arange(3) + 0.5) / 3, indexing='xy')
    locations = torch.stack([x, y], -1).view(1, 12, 1, 1, 1, 2)
    found = deform_attn(value, [(3, 4)], locations, torch.ones(1, 12, 1, 1, 1))
    # (i + ½)/4·4 − ½ is off by a rounding or two of positions up to 4.
    torch.testing.assert_close(found.flatten(), torch.arange(12.0), rtol=0, atol=1e-5)


def test_images_and_heads_do_not_see_each_other():
    inputs = make()
    one = {n: x[1:, ..., 2:, :] if n == 'value' else x[1:, :, 2:] for n, x in inputs.items()}
    assert error(call(one), call(inputs)[1:, :, -5:]) < FP64


@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    # Unit roundoffs 6e-8, 2⁻¹¹, 2⁻⁸ of the rounded results, times a few; positions of fp32 are
    # exact to 1e-6 of a pixel here.
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
def test_low_precision_stays_close_to_fp64(dtype, tolerance):
    inputs = make(dtype=torch.float32)
    inputs['value'] = inputs['value'].to(dtype)
    output, grads = with_gradients(call, inputs)
    assert output.dtype == grads['value'].dtype == dtype
    assert grads['sampling_locations'].dtype == grads['attention_weights'].dtype == torch.float32
    # The definition sees the same rounded gradient of the output.
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype).double()
    exact = {n: x.double() for n, x in inputs.items()}
    assert_same((output, grads), with_gradients(definition, exact, grad=grad), tolerance)


def test_all_inputs_in_half_precision():
    inputs = make(dtype=torch.bfloat16)
    output, grads = with_gradients(call, inputs)
    assert {output.dtype, *(g.dtype for g in grads.values())} == {torch.bfloat16}
    exact = {n: x.double() for n, x in inputs.items()}
    assert error(output, definition(exact)) < 1e-2


def test_a_location_that_is_no_number_spoils_its_own_query_only():
    inputs = make(dtype=torch.float32)
    expected = call(inputs)
    inputs['sampling_locations'][0, 3, 1, 0, 0] = torch.tensor([float('nan'), 0.5])
    inputs['sampling_locations'][0, 4, 1] = float('inf')
    output, grads = with_gradients(call, inputs)
    assert output.isnan()[0, 3, 5:10].all()
    # Infinitely far outside is outside: zeros.
    assert output[0, 4].isfinite().all()
    others = torch.ones(2, 9, 15, dtype=torch.bool)
    others[0, 3:5] = False
    assert torch.equal(output[others], expected[others])
    assert grads['sampling_locations'].shape == inputs['sampling_locations'].shape


def test_strided_and_expanded_inputs_and_gradients():
    inputs = make()
    expanded = {
        'value': inputs['value'][..., :1].expand(-1, -1, -1, 5),
        'sampling_locations': inputs['sampling_locations'][:, :1].expand(-1, 9, -1, -1, -1, -1),
        'attention_weights': inputs['attention_weights'].movedim(1, -1).contiguous().movedim(-1, 1),
    }
    leaves = {n: x.requires_grad_() for n, x in expanded.items()}
    output = call(leaves)
    grad = torch.ones((), dtype=torch.float64).expand(output.shape)
    grads = torch.autograd.grad(output, list(leaves.values()), grad)
    found = output, dict(zip(NAMES, grads, strict=True))
    assert_same(found, with_gradients(definition, expanded, grad=grad.contiguous()), FP64)


def test_no_output_depends_on_fresh_memory():
    inputs = make()
    expected = with_gradients(call, inputs)
    # torch then fills every torch.empty with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = with_gradients(call, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, expected, FP64)


# ----------------------------------------------------------------------------------- registration


def flat(shapes=PYRAMID):
    return [size for level in shapes for size in level]


def test_opcheck():
    value, locations, weights = make(dtype=torch.float32).values()
    args = (value, flat(), None, None, locations, weights, 'auto')
    torch.library.opcheck(OP_BACKWARD.default, (OP(*args) + 1, None, *args[:-1], False, 'auto'))
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]
    torch.library.opcheck(OP.default, leaves)


def test_opcheck_of_the_fused_op():
    value, reference_points, offsets, logits = fused(make(dtype=torch.float32)).values()
    args = (value, [], torch.tensor(PYRAMID), reference_points, offsets, logits, 'auto')
    torch.library.opcheck(OP_BACKWARD.default, (OP(*args) + 1, OP(*args), *args[:-1], True, 'auto'))
    leaves = [
        x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in args
    ]
    torch.library.opcheck(OP.default, leaves)


def test_meta_tensors_have_the_shapes_of_real_ones():
    inputs = make(dtype=torch.bfloat16)
    real, meta = call(inputs), call({n: x.to('meta') for n, x in inputs.items()})
    assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


def test_compiles_into_one_graph():
    inputs = make(dtype=torch.float32)
    # Inductor needs a compiler on the machine and treats a registered op the same way.
    compiled = torch.compile(call, fullgraph=True, backend='aot_eager')
    assert_same(with_gradients(compiled, inputs), with_gradients(call, inputs), 1e-6)


class Reader(torch.nn.Module):
    def forward(self, *tensors):
        return call(dict(zip(NAMES, tensors, strict=True)))


def test_exports():
    inputs = make(dtype=torch.float32)
    program = torch.export.export(Reader(), tuple(inputs.values()))
    assert any(node.target == OP.default for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs.values()), call(inputs))


@pytest.mark.parametrize('compiled', [False, True])
def test_autocast_rounds_the_value_and_nothing_else(compiled):
    inputs = make(dtype=torch.float32)

    def under_autocast(x):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            return call(x)

    function = under_autocast
    if compiled:
        function = torch.compile(under_autocast, fullgraph=True, backend='aot_eager')
    output, grads = with_gradients(function, inputs)
    expected, expected_grads = with_gradients(call, {**inputs, 'value': inputs['value'].bfloat16()})
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    for name in NAMES:
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name], expected_grads[name].float()), name


def test_flops_follow_the_formula():
    inputs = {n: x.requires_grad_() for n, x in make().items()}
    with FlopCounterMode(display=False) as counter:
        call(inputs).sum().backward()
    samples = 2 * 9 * 3 * len(PYRAMID) * 4
    counts = counter.get_flop_counts()['Global']
    assert counts[OP] == 2 * 4 * samples * 5
    assert counts[OP_BACKWARD] == 2 * counts[OP]


# -------------------------------------------------------------------------------------- bad input

BAD = {
    'value': (
        lambda x: {**x, 'value': x['value'][0]},
        {},
        ValueError,
        r'value must have shape \(B, S',
    ),
    'levels': (
        lambda x: {**x, 'value': x['value'][:, 1:]},
        {},
        ValueError,
        r'value has S = 42 pixels, but the 4 levels of spatial_shapes add up to 43',
    ),
    'locations': (
        lambda x: {**x, 'sampling_locations': x['sampling_locations'][..., 0]},
        {},
        ValueError,
        r'sampling_locations must have shape \(B, Q, H, L, P, 2\), got 5 dim',
    ),
    'heads': (
        lambda x: {**x, 'sampling_locations': x['sampling_locations'][:, :, :1]},
        {},
        ValueError,
        r'sampling_locations must have shape .* = \(2, 9, 3, 4, 4, 2\), got \(2, 9, 1, 4, 4, 2\)',
    ),
    'weights': (
        lambda x: {**x, 'attention_weights': x['attention_weights'][..., :3]},
        {},
        ValueError,
        r'attention_weights must have shape \(B, Q, H, L, P\)',
    ),
    'value dtype': (
        lambda x: {**x, 'value': x['value'].int()},
        {},
        TypeError,
        r'value must be float32, bfloat16, float16 or float64, got torch.int32',
    ),
    'location dtype': (
        lambda x: {**x, 'sampling_locations': x['sampling_locations'].half()},
        {},
        TypeError,
        r'sampling_locations must be torch.float32 or the dtype of value.*got torch.float16',
    ),
    'not a tensor': (
        lambda x: {**x, 'attention_weights': None},
        {},
        TypeError,
        r'attention_weights must be a tensor, got NoneType',
    ),
    'devices': (
        lambda x: {**x, 'attention_weights': x['attention_weights'].to('meta')},
        {},
        ValueError,
        r'attention_weights is on meta and value on cpu',
    ),
    'tensor that does not add up': (
        lambda x: x,
        {'shapes': torch.tensor(PYRAMID[:2] + PYRAMID[1:3])},
        ValueError,
        r'value has S = 43 pixels, but the 4 levels of spatial_shapes add up to 40',
    ),
    'tensor of floats': (
        lambda x: x,
        {'shapes': torch.tensor(PYRAMID).float()},
        TypeError,
        r'spatial_shapes must be of torch.int64 or torch.int32, got torch.float32',
    ),
    'flat tensor': (
        lambda x: x,
        {'shapes': torch.tensor(PYRAMID).flatten()},
        ValueError,
        r'spatial_shapes must have shape \(L, 2\) with L ≥ 1, got \(8,\)',
    ),
    'tensor elsewhere': (
        lambda x: x,
        {'shapes': torch.tensor(PYRAMID, device='meta')},
        ValueError,
        r'spatial_shapes is on meta and value on cpu',
    ),
    'no points': (
        lambda x: {**x, 'sampling_locations': x['sampling_locations'][..., :0, :]},
        {},
        ValueError,
        r'P must be at least 1, got sampling_locations of shape',
    ),
    'no string': (
        lambda x: x,
        {'shapes': '57'},
        TypeError,
        r"spatial_shapes must be a list of \(h, w\), got '57'",
    ),
    'no level': (lambda x: x, {'shapes': []}, ValueError, r'at least one level'),
    'empty level': (
        lambda x: x,
        {'shapes': [(0, 4), *PYRAMID]},
        ValueError,
        r'h, w ≥ 1, got \(0, 4\)',
    ),
    'backend': (
        lambda x: x,
        {'backend': 'mmcv'},
        ValueError,
        r"backend must be None, 'triton', 'numba' or 'reference', got 'mmcv'",
    ),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_named(case):
    change, options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call(change(make(dtype=torch.float32)), **options)


BAD_FUSED = {
    'reference_points': (
        lambda x: x['reference_points'][:, :, :2],
        ValueError,
        r'reference_points must have shape \(B or 1, Q, L, 2\) = .*, got \(1, 9, 2, 2\)',
    ),
    'dtype': (
        lambda x: x['reference_points'].bfloat16(),
        TypeError,
        r'reference_points must be torch.float32 for positions in large maps, got torch.bfloat16',
    ),
    'nothing': (lambda x: None, TypeError, r'reference_points must be a tensor, got NoneType'),
}


@pytest.mark.parametrize('case', BAD_FUSED)
def test_bad_reference_points_are_named(case):
    change, kind, message = BAD_FUSED[case]
    inputs = fused(make(dtype=torch.float32))
    with pytest.raises(kind, match=message):
        call_fused({**inputs, 'reference_points': change(inputs)})


def test_triton_without_a_gpu_says_why(monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run here: .*backend=None"):
        call(make(dtype=torch.float32), backend='triton')
