"""The table of ops: inputs, calls, tolerances and bad arguments, from which all tests are made.

A new op is a row of `OPS`; test_new_op.py names what else it lacks. Inputs are made for a map
(h, w): a sequence has h·w tokens.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial

import sampling
import scans
import torch
from kernel_testing import RecordedOps, normal
from op_row import BF16, FP16, FP32, FP64, HW, MAPS, Bad, Case, Inputs, Op, no_tokens
from torch import Tensor

import ttt_kernels
from ttt_kernels import causal_conv
from ttt_kernels._inputs import state_dtype
from ttt_kernels.causal_conv.reference import primal

# ------------------------------------------------------------------------------------- ttt_linear


def scan(tokens: int, ways: str = 'fb', size: int = 16, *, scale=True, eps=1e-6, **sizes) -> Case:
    options = {'ways': ways, 'size': size, 'eps': eps}
    return Case((1, tokens), {'ways': ways, 'size': size, 'scale': scale, **sizes}, options)


def make_scan(hw: HW, *, scale: bool = True, device: str = 'cpu', **sizes) -> Inputs:
    inputs = {n: x.to(device) for n, x in scans.make(math.prod(hw), **sizes).items()}
    return inputs if scale else {**inputs, 'token_scale': None}


TTT_LINEAR = Op(
    'ttt_linear',
    make_scan,
    lambda inputs, hw, **options: scans.call(inputs, **options),
    lambda inputs, hw, **options: scans.definition(inputs, **options),
    tokens=('q', 'k', 'v'),
    images=('q', 'k', 'v', 'eta'),
    # Past `SEGMENT` mini-batches the backward pass starts from states that were kept.
    cases=(
        *(scan(t, dim=4) for t in (1, 15, 16, 17, 52, 63, 196)),
        *(scan(17, size=b) for b in (1, 4, 17)),
        *(scan(5, 'ffb', 40, dim=1), scan(23, 'bf', 4), scan(23, 'f', 4), scan(17, 'b', 4, dim=33)),
        *(scan(70, size=1, heads=1), scan(19, size=4, scale=False), scan(9, size=4, eps=0.3)),
    ),
    kernel_cases=(
        *(scan(17, dim=64, heads=1), scan(18, 'bfb', dim=32, batch=1, scale=False, eps=0.3)),
        *(scan(19, dim=d, heads=3, batch=1) for d in (6, 48, 72, 128)),
    ),
    gpu_cases=(
        *(scan(t, dim=64, heads=3) for t in (17, 1, 15, 16, 52, 63, 64, 196, 1000)),
        *(scan(t, 'bfb', dim=32, scale=False) for t in (16, 70, 196)),
    ),
    refused={
        'd is 136': scan(2, dim=136, batch=1, heads=1),
        'mini_batch_size is 17': scan(18, size=17, dim=32, heads=1),
        'R is 32': scan(2, 'f' * 32, dim=32, batch=1, heads=1),
    },
    # Roundings of the inner gradients go through a chain of mini-batches and LayerNorms.
    tolerance={FP64: 1e-12, FP32: 2e-5, FP16: 3e-3, BF16: 2.5e-2},
    kernel_tolerance={FP64: 1e-12, FP32: 5e-4, FP16: 4e-3, BF16: 3e-2},
    # The output hardly depends on the length of a step behind a LayerNorm.
    cancelling=('eta', 'token_scale'),
    variants=(scan(15, scale=False),),
    bad=(
        no_tokens('T must be at least 1', 'q', 'k', 'v', 'eta'),
        Bad('token_scale', {'token_scale': lambda x: x[:, :4]}),
        Bad('mini_batch_size', {'size': 0}),
        Bad('mini_batch_size', {'size': 0.5}, TypeError),
        Bad('directions', {'ways': ''}),
        Bad('directions', {'ways': 'f'}),
    ),
)

# ------------------------------------------------------------------------------------ causal_conv


def convolution(tokens: int, ways: str, weights: int, dim: int, taps: int, **sizes) -> Case:
    sizes |= {'ways': ways, 'weights': weights, 'dim': dim, 'taps': taps}
    return Case((1, tokens), sizes, {'ways': ways})


def make_convolution(
    hw, ways='fb', weights=2, dim=6, taps=4, batch=2, heads=1, dtype=FP64, device='cpu'
) -> Inputs:
    """Inputs by name; x is a part of a projection."""
    generator = torch.Generator().manual_seed(0)
    packed = normal(generator, batch, math.prod(hw), len(ways), 2 * dim + 1).to(device, dtype)
    shape = (len(ways), dim, taps)
    kernels = [normal(generator, *shape).to(device, state_dtype(dtype)) for _ in range(weights)]
    return {'x': packed[..., :dim], **dict(zip(('weight', 'other'), kernels, strict=False))}


def call_convolution(inputs: Inputs, hw: HW, ways='fb', backend='reference', **options) -> Tensor:
    """The outputs side by side."""
    options = {'directions': tuple(scans.WAYS[way] for way in ways), **options}
    return torch.cat(causal_conv(*inputs.values(), backend=backend, **options), -1)


def convolved(inputs: Inputs, hw: HW, ways='fb') -> Tensor:
    x, *weights = inputs.values()
    return torch.cat([primal(x, w, ways) for w in weights], -1)


CONVOLUTIONS = (
    convolution(37, 'fb', 2, 70, 3),
    convolution(1, 'b', 1, 16, 4),
    convolution(2, 'fb', 2, 5, 4),
    convolution(3, 'bf', 2, 6, 8),
    convolution(130, 'f', 1, 64, 1),
)
CAUSAL_CONV = Op(
    'causal_conv',
    make_convolution,
    call_convolution,
    convolved,
    tokens=('x',),
    images=('x',),
    cases=(*MAPS, *CONVOLUTIONS),
    kernel_cases=CONVOLUTIONS,
    gpu_cases=(*CONVOLUTIONS, convolution(4200, 'fb', 2, 384, 4)),
    refused={'K is 9': convolution(5, 'fb', 1, 6, 9)},
    convolved=('weight', 'other'),
    variants=(convolution(9, 'fb', 1, 6, 4),),
    bad=(
        no_tokens('T must be at least 1', 'x'),
        Bad('weight', {'weight': lambda w: w[..., :0]}),
        Bad('other', {'other': lambda w: w[..., 1:]}),
        Bad('directions', {'ways': 'f'}),
    ),
)

# ----------------------------------------------------------------------------------- inner steps

# With damping, s = 1/3 would leave the step tiny: this one makes it as large as the weights.
SCALE = 5.0


def make_step(
    hw, dim=6, batch=2, heads=2, dtype=FP64, seed=0, device='cpu', weights=2, channels=False
) -> Inputs:
    """Inputs by name; a seed gives one set in all dtypes. q, k and v share one projection.

    channels: Of ttt_dwconv, tokens without heads and one weight `(d, 3, 3)`.
    """
    generator, new = torch.Generator().manual_seed(seed), {'device': device, 'dtype': dtype}
    width = dim if channels else heads * dim
    packed = normal(generator, batch, math.prod(hw), 3 * width + 1)
    # Moved in one piece: views that are moved one by one arrive contiguous.
    tokens = packed.to(**new)[..., :-1].chunk(3, -1)
    if channels:
        return dict(zip('qkv', tokens, strict=True)) | {
            'w3': (normal(generator, dim, 3, 3) / 3).to(device, state_dtype(dtype))
        }
    inputs = {n: x.unflatten(-1, (heads, dim)) for n, x in zip('qkv', tokens, strict=True)}
    # The third has numbers of its own: the first two are those of a step with two.
    third = torch.Generator().manual_seed(seed + 1)
    for name, drawn in zip(
        ('w1', 'w2', 'w3')[:weights], (generator, generator, third), strict=False
    ):
        w = normal(drawn, heads, dim, dim) / dim**0.5
        inputs[name] = w.to(device, state_dtype(dtype))
    return inputs


def step_of(name: str, scale: float = SCALE) -> tuple[Callable[..., Tensor], ...]:
    """The call of an op and its definition, from inputs and a map."""
    op, reference = getattr(ttt_kernels, name), f'ttt_kernels.{name}.reference'

    def call(inputs, hw, scale=scale, backend='reference', **options):
        size = {'hw': hw} if name == 'ttt_dwconv' else {}
        return op(**inputs, **size, scale=scale, backend=backend, **options)

    def definition(inputs, hw, scale=scale, **options):
        tensors = list(inputs.values()) + [None] * (name == 'ttt_mlp' and 'w3' not in inputs)
        size = hw if name == 'ttt_dwconv' else ()
        return importlib.import_module(reference).primal(*tensors, *size, scale, **options)

    return call, definition


def inner_gradient(op: Op, inputs: Inputs, hw: HW, backend: str | None) -> Tensor:
    """G, which the registered op keeps for its backward pass."""
    with RecordedOps() as calls:
        op.call(inputs, hw, scale=1 / 3, backend=backend)
    return calls[0][2][1]


GPU_MAPS = tuple(
    Case(hw, {'dim': d})
    for hw, d in (((7, 9), 32), ((1, 1), 32), ((9, 13), 64), ((31, 33), 48), ((50, 84), 32))
)
INNER_STEP = {'tokens': ('q', 'k', 'v'), 'images': ('q', 'k', 'v')}


def kernel_maps(*dims: int, **options) -> tuple[Case, ...]:
    """Maps of one token, of some blocks and of ragged ones, for heads of these sizes."""
    cases = [Case((3, 13), {'dim': d, 'batch': 1}) for d in dims]
    cases += [Case(hw, {'dim': 32, 'batch': 1}) for hw in ((1, 1), (9, 13))]
    return (*cases, Case((3, 13), {'dim': 32, 'batch': 1}, options))


def step_cases(**options) -> tuple[Case, ...]:
    widths = tuple(Case((5, 3), {'dim': d}) for d in (1, 2, 33))
    return (*MAPS, *widths, Case((6, 5), {'dim': 20}, options), Case((60, 70), {'dim': 3}))


TTT_GLU = Op(
    'ttt_glu',
    make_step,
    *step_of('ttt_glu'),
    **INNER_STEP,
    cases=step_cases(damping=False),
    kernel_cases=kernel_maps(32, 64, 5, 48, damping=False),
    gpu_cases=(*GPU_MAPS, Case((9, 13), {'dim': 32}, {'damping': False})),
    refused={
        'd is 65': Case((2, 2), {'dim': 65}),
        'the batch is empty': Case((2, 2), {'dim': 32, 'batch': 0}),
    },
    suppressed=('k', 'v', 'w1', 'w2'),
    bad=(no_tokens('N must be at least 1', 'q', 'k', 'v'),),
)
TTT_DWCONV = Op(
    'ttt_dwconv',
    partial(make_step, channels=True),
    *step_of('ttt_dwconv'),
    **INNER_STEP,
    cases=step_cases(damping=False),
    kernel_cases=(
        *kernel_maps(1, 5, 80, damping=False),
        Case((3, 5), {'dim': 32, 'batch': 1}, {'scale': 0.1}),
    ),
    gpu_cases=(*GPU_MAPS, Case((9, 13), {'dim': 5}, {'damping': False})),
    refused={'the batch is empty': Case((2, 2), {'dim': 32, 'batch': 0})},
    suppressed=('k', 'v', 'w3'),
    bad=(
        no_tokens('q', 'q', 'k', 'v'),
        Bad('hw', {'hw': (4, 5)}),
        Bad('hw', {'hw': (0, 15)}),
        Bad('hw', {'hw': 15}, TypeError),
        Bad('hw', {'hw': (2.5, 6)}, TypeError),
    ),
)
MLP = {
    **INNER_STEP,
    'cases': step_cases(loss='l2'),
    'kernel_cases': (
        *kernel_maps(64, 5, 48, loss='l2'),
        # No number of fp32, which a kernel must not round the factor to.
        Case((3, 5), {'dim': 32, 'batch': 1}, {'scale': 0.1, 'loss': 'l2'}),
    ),
    'gpu_cases': (*GPU_MAPS, Case((9, 13), {'dim': 64}, {'loss': 'l2'})),
}
BAD_MLP = (
    no_tokens('N must be at least 1', 'q', 'k', 'v'),
    Bad('loss', {'loss': 'l1'}),
    Bad('scale', {'scale': math.nan}),
)
TTT_MLP = Op(
    'ttt_mlp',
    make_step,
    *step_of('ttt_mlp', scale=1.0),
    **MLP,
    refused={'d is 72': Case((2, 2), {'dim': 72})},
    bad=BAD_MLP,
)
TTT_MLP_SWIGLU = Op(
    'ttt_mlp',
    partial(make_step, weights=3),
    *step_of('ttt_mlp', scale=1.0),
    **MLP,
    refused={'d is 128': Case((2, 2), {'dim': 128})},
    bad=BAD_MLP,
)

# ----------------------------------------------------------------------------------- deform_attn


def levels(hw: HW) -> list[HW]:
    """A map and one of half its sides, rounded up."""
    return [hw, (-(-hw[0] // 2), -(-hw[1] // 2))]


def make_sampling(hw: HW, shapes=None, **sizes) -> Inputs:
    """Values in the type of the tokens; positions and weights in fp32 or fp64."""
    dtype, device = sizes.pop('dtype', FP64), sizes.pop('device', 'cpu')
    inputs = sampling.make(shapes or levels(hw), **sizes)
    wide = state_dtype(dtype)
    return {n: x.to(device, dtype if n == 'value' else wide) for n, x in inputs.items()}


def pyramid(shapes: tuple[HW, ...], **sizes) -> Case:
    return Case(shapes[0], {'shapes': shapes, **sizes}, {'shapes': shapes})


def of_shapes(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of inputs and sizes of levels as one of inputs and a map."""

    def on_map(inputs: Inputs, hw: HW, **options) -> Tensor:
        return function(inputs, **{'shapes': levels(hw), **options})

    return on_map


PYRAMIDS = (
    pyramid(sampling.PYRAMID, queries=9),
    pyramid(sampling.PYRAMID, queries=17, points=3),
    pyramid(((1, 1),), queries=1, points=1),
    pyramid(((1, 9), (9, 1)), queries=9, points=1),
    pyramid(((8, 6), (4, 3), (2, 2)), queries=17, dim=32),
)
DEFORM_ATTN = Op(
    'deform_attn',
    make_sampling,
    of_shapes(sampling.call),
    of_shapes(sampling.definition),
    tokens=('value',),
    variants=(Case((3, 5), {}, {'shapes': torch.tensor(levels((3, 5)))}),),
    cases=(*MAPS[:4], *PYRAMIDS),
    kernel_cases=(
        pyramid(((1, 1),), queries=1, points=1, dim=16),
        pyramid(((6, 7),), queries=17, points=3, dim=32, batch=1),
        pyramid(sampling.PYRAMID, queries=9, points=2, dim=5, batch=1),
    ),
    gpu_cases=(
        *(pyramid(sampling.PYRAMID, queries=63, dim=d) for d in (32, 16)),
        pyramid(((1, 1),), queries=63, dim=24),
        pyramid(((31, 33), (16, 17)), queries=63, dim=64),
        pyramid(((9, 9),), queries=63, dim=128),
        # The adapter's extractors and injectors.
        pyramid(((50, 84),), queries=22_050, dim=32, inside=True),
        pyramid(((100, 168), (50, 84), (25, 42)), queries=4200, dim=32, inside=True),
    ),
    # Half types: one rounding of each result. In fp32 positions of up to 168 pixels are rounded as
    # product and less half a pixel, and sums round like 128 terms of one sign.
    kernel_tolerance={FP64: 1e-12, FP32: 4e-5, FP16: 2e-3, BF16: 1e-2},
    refused={
        'd is 130': pyramid(((2, 2),), queries=3, dim=130),
        'there are no queries': pyramid(((2, 2),), queries=0),
    },
    images=('value', 'sampling_locations', 'attention_weights'),
    bad=(
        Bad('value', {'value': lambda x: x[:, 1:]}),
        Bad('spatial_shapes', {'shapes': '57'}, TypeError),
        Bad('spatial_shapes', {'shapes': []}),
        Bad('spatial_shapes', {'shapes': [(0, 4), (3, 5)]}),
        Bad('spatial_shapes', {'shapes': torch.ones(2, 2)}, TypeError),
        Bad('spatial_shapes', {'shapes': torch.ones(4, dtype=torch.int64)}),
        Bad('spatial_shapes', {'shapes': torch.ones(2, 2, dtype=torch.int64)}),
        Bad('sampling_locations', {'sampling_locations': lambda x: x[..., 0]}),
        Bad('sampling_locations', {'sampling_locations': lambda x: x[..., :0, :]}),
        Bad('sampling_locations', {'sampling_locations': Tensor.half}, TypeError),
    ),
)


OPS = {
    'ttt_linear': TTT_LINEAR,
    'causal_conv': CAUSAL_CONV,
    'ttt_glu': TTT_GLU,
    'ttt_dwconv': TTT_DWCONV,
    'ttt_mlp': TTT_MLP,
    'ttt_mlp SwiGLU': TTT_MLP_SWIGLU,
    'deform_attn': DEFORM_ATTN,
}
# One full-batch step each.
STEPS = {name: OPS[name] for name in ('ttt_glu', 'ttt_dwconv', 'ttt_mlp', 'ttt_mlp SwiGLU')}
