"""The ViT-Adapter's attention in fp32, bf16 and fp16 against itself in fp64, up to 66 800 tokens.

Places are numbers like all others here: rounding one can carry it over the edge of a pixel, where
the slope of the interpolation changes. So the centres of the queries are among the leaves.
"""

import copy

import pytest
import torch
from precision import DEVICES, MAPS, OUTPUT, TYPES, Truth, evaluate
from torch import nn
from torch.func import functional_call

from mmvttt.models.adapters.deformable_attention import DeformableAttention, Level, SamplingGrid

DIMS = 32


def function_of(module, grid, device, dtype):
    half = dtype in (torch.bfloat16, torch.float16)

    def function(leaves):
        query, value = leaves.pop('query'), leaves.pop('value')
        placed = grid._replace(centres=leaves.pop('centres'))
        with torch.autocast(device, dtype if half else torch.bfloat16, enabled=half):
            return functional_call(module, leaves, (query, value, placed))

    return function


def check(queries, values, device, draws=2):
    """Queries of a map, values of two levels, as the injector has them."""
    torch.manual_seed(0)
    module = DeformableAttention(DIMS, num_heads=2, num_levels=2)
    for linear in (module.sampling_offsets, module.attention_weights):
        nn.init.normal_(linear.weight, std=0.1)
    levels = [Level(8, *values), Level(16, -(-values[0] // 2), -(-values[1] // 2))]
    asking = [Level(16, *queries)]
    grid = SamplingGrid.between(asking, levels, torch.float32, torch.device('cpu'))
    leaves = {
        'query': torch.randn(1, queries[0] * queries[1], DIMS),
        'value': torch.randn(1, sum(level.num_cells for level in levels), DIMS),
        'centres': grid.centres,
        **{n: p.detach() for n, p in module.named_parameters()},
    }
    grad = torch.randn(leaves['query'].shape)
    exact = copy.deepcopy(module).double()
    truth = Truth(function_of(exact, grid, 'cpu', torch.float64), leaves, grad)
    module.to(device)
    leaves = {n: x.to(device) for n, x in leaves.items()}
    for dtype in TYPES:
        actual = evaluate(function_of(module, grid, device, dtype), leaves, grad.to(device))
        assert actual[OUTPUT].dtype == dtype
        # Places are fp32 in all types.
        truth.assert_near(actual, dtype, types={'centres': torch.float32}, draws=draws)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('tokens', [1, 15, 63, 196])
def test_output_and_every_gradient(tokens, device):
    check(MAPS[tokens], MAPS[tokens], device)


@pytest.mark.parametrize('device', DEVICES)
def test_the_tokens_of_a_detection_image_ask_its_pyramid(device):
    check(MAPS[196], MAPS[4200], device)


@pytest.mark.stress
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('tokens', [4200, 66_800])
def test_as_many_queries_as_values(tokens, device):
    check(MAPS[tokens], MAPS[tokens], device, draws=1 if tokens > 4200 else 2)
