"""ttt_kernels.deform_attn on the CPU: definition, gradients, registration, errors."""

import torch
from kernel_testing import error, with_gradients
from sampling import NAMES, PYRAMID, call, definition, fused, make
from torch.utils.flop_counter import FlopCounterMode

from ttt_kernels import deform_attn, deform_attn_fused

OP = torch.ops.ttt_kernels.deform_attn
OP_BACKWARD = torch.ops.ttt_kernels.deform_attn_backward
# fp64 has 16 digits, sums of at most some hundred terms.
FP64 = 1e-12


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


# ----------------------------------------------------------------------------------- registration


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
