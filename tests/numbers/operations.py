"""The ops of ttt_kernels by name: inputs of any number of tokens, and calls, in any type."""

from collections.abc import Callable
from typing import NamedTuple

import convolutions
import inner_steps
import scans
import torch
from torch import Tensor

from ttt_kernels import deform_attn

# Numbers of tokens, as maps: 196 are 224 × 224 pixels at patch 16; 4200 and 66 800 are 1333 × 800
# pixels at patch 16 and at patch 4.
MAPS = {1: (1, 1), 15: (3, 5), 63: (7, 9), 196: (14, 14), 4200: (60, 70), 66_800: (200, 334)}


class Operation(NamedTuple):
    """An op, on maps.

    Attributes:
        make: fp64 inputs by name, of a map (h, w).
        call: The output, from the inputs and (h, w).
        tokens: Those of the inputs that come in the type of the tokens; the others stay in fp32.
        cancelling: Those whose gradients are small differences.
        convolved: Those whose gradients the reference leaves to torch's convolutions.
        suppressed: Those, of loud tokens: a step damped to a length of 1 hardly feels how long its
            gradient was.
    """

    make: Callable[[tuple[int, int]], dict[str, Tensor]]
    call: Callable[..., Tensor]
    tokens: tuple[str, ...] = ('q', 'k', 'v')
    cancelling: tuple[str, ...] = ()
    convolved: tuple[str, ...] = ()
    suppressed: tuple[str, ...] = ()


def make_ttt_linear(hw: tuple[int, int]) -> dict[str, Tensor]:
    return scans.make(hw[0] * hw[1], batch=1, heads=1, dim=32)


def call_ttt_linear(inputs: dict[str, Tensor], hw: tuple[int, int], **options) -> Tensor:
    return scans.call(inputs, **options)


def levels(hw: tuple[int, int]) -> list[tuple[int, int]]:
    """A map and one of half its sides, rounded up."""
    return [hw, (-(-hw[0] // 2), -(-hw[1] // 2))]


def make_deform_attn(hw: tuple[int, int]) -> dict[str, Tensor]:
    """37 queries with 4 points a level, one in three outside of the map."""
    generator = torch.Generator().manual_seed(0)
    options = {'generator': generator, 'dtype': torch.float64}
    pixels = sum(h * w for h, w in levels(hw))
    weights = torch.rand(1, 37, 2, 2, 4, **options)
    return {
        'value': torch.randn(1, pixels, 2, 32, **options),
        'sampling_locations': 1.5 * torch.rand(1, 37, 2, 2, 4, 2, **options) - 0.25,
        'attention_weights': weights / weights.sum((-2, -1), keepdim=True),
    }


def call_deform_attn(inputs: dict[str, Tensor], hw: tuple[int, int], **options) -> Tensor:
    value, locations, weights = inputs.values()
    return deform_attn(value, levels(hw), locations, weights, **options)


OPERATIONS = {
    'ttt_linear': Operation(
        # The output hardly feels the length of a step behind a LayerNorm.
        make_ttt_linear,
        call_ttt_linear,
        cancelling=('eta', 'token_scale'),
    ),
    'causal_conv': Operation(
        lambda hw: convolutions.make(hw[0] * hw[1], batch=1, channels=32),
        lambda inputs, hw, **options: convolutions.call(inputs, **options),
        tokens=('x',),
        convolved=('weight', 'other'),
    ),
    'ttt_glu': Operation(
        lambda hw: inner_steps.make_glu(hw, dim=32, batch=1, heads=1),
        inner_steps.call_glu,
        suppressed=('k', 'v', 'w1', 'w2'),
    ),
    'ttt_dwconv': Operation(
        lambda hw: inner_steps.make_dwconv(hw, dim=32, batch=1),
        inner_steps.call_dwconv,
        suppressed=('k', 'v', 'w3'),
    ),
    'deform_attn': Operation(make_deform_attn, call_deform_attn, tokens=('value',)),
}
