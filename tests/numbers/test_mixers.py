"""Every token mixer, and backbones, in fp32, bf16 and fp16 against themselves in fp64.

bf16 and fp16 are autocast, as in training. The bounds, `Truth.allowed`, are a few roundings of the
type; precision.py derives them.
"""

import copy

import mixers
import pytest
import torch
from mixers import BACKBONES, CANCELLING, DIMS, MIXERS, STEPS, VIT3, VITTT
from precision import DEVICES, MAPS, OUTPUT, ROUNDINGS, TYPES, Truth, evaluate
from torch import nn

stress = pytest.mark.stress
every_device = pytest.mark.parametrize('device', DEVICES)
# On a CPU torch computes them, for Vittt inside of the op's reference.
CONVOLUTIONS = ('q_conv', 'k_conv', 'v_conv')
EXTREMES = {
    'faint': lambda x: 1e-6 * x,
    'zero': torch.zeros_like,
    'constant': torch.ones_like,
}
HALF = torch.float16


class Prepared:
    """A module, its leaves, and the fp64 answer."""

    def __init__(self, mixer, hw, x, size=1.0):
        self.mixer, self.hw, self.module = mixer, hw, mixer.make()
        self.leaves = mixers.leaves_of(self.module, x)
        exact = copy.deepcopy(self.module).double()
        function = mixers.function_of(mixer, exact, hw, torch.float64)
        with torch.no_grad():
            shape = function({n: x.double() for n, x in self.leaves.items()}).shape
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        self.truth = Truth(function, self.leaves, size * grad)

    def run(self, dtype, device):
        function = mixers.function_of(self.mixer, self.module.to(device), self.hw, dtype, device)
        leaves = {n: x.to(device) for n, x in self.leaves.items()}
        actual = evaluate(function, leaves, self.truth.grad.float().to(device))
        assert all(x.isfinite().all() for x in actual.values())
        return actual


def tokens_of(count):
    return torch.randn(1, count, DIMS, generator=torch.Generator().manual_seed(1))


def check(name, tokens, device, draws=2):
    prepared = Prepared(MIXERS[name], MAPS[tokens], tokens_of(tokens))
    # The step of a single token is almost all that its output consists of: what the LayerNorm
    # behind it lets through is the ε, and test_ops.py looks at that.
    skip = STEPS if tokens == 1 else ()
    torchs = CONVOLUTIONS if device == 'cpu' else ()
    sums = {n: tokens for n in prepared.leaves if n.partition('.')[0] in torchs}
    for dtype in TYPES:
        actual = prepared.run(dtype, device)
        assert actual[OUTPUT].dtype == dtype
        prepared.truth.assert_near(
            actual, dtype, cancelling=CANCELLING, one_by_one=sums, skip=skip, draws=draws
        )


@every_device
@pytest.mark.parametrize(
    ('name', 'tokens'),
    [*((n, t) for n in MIXERS for t in (1, 63)), *((n, 196) for n in (*VITTT, *VIT3))],
)
def test_output_and_every_gradient(name, tokens, device):
    check(name, tokens, device)


# Softmax attention is torch's, and takes 40 minutes for the longer one.
LONG = [name for name in MIXERS if name != 'softmax attention']


# The patches of a detection image, and the image at stride 4.
@stress
@every_device
@pytest.mark.parametrize(('tokens', 'draws'), [(4200, 2), (66_800, 1)])
@pytest.mark.parametrize('name', LONG)
def test_a_detection_image(name, tokens, draws, device):
    check(name, tokens, device, draws)


@every_device
@pytest.mark.parametrize('extreme', EXTREMES)
@pytest.mark.parametrize('name', MIXERS)
def test_finite_and_near_at_extremes(name, extreme, device):
    prepared = Prepared(MIXERS[name], MAPS[63], EXTREMES[extreme](tokens_of(63)), 2**-6)
    for dtype in TYPES:
        actual = prepared.run(dtype, device)
        # Of faint tokens fp16 keeps no digits.
        if not (dtype == HALF and extreme == 'faint'):
            prepared.truth.assert_near(actual, dtype, cancelling=CANCELLING, skip=STEPS, draws=1)


# Blocks one after the other, each with a mixer's number of layers before and after the mixer.
ROUNDINGS_OF_A_BACKBONE = {dtype: 4 * n for dtype, n in ROUNDINGS.items()}


@every_device
@pytest.mark.parametrize('image', ['noise', 'zero', 'constant'])
@pytest.mark.parametrize('name', BACKBONES)
def test_backbones(name, image, device):
    # In evaluation: the statistics of a batch make a signal of the rounding of a constant image.
    x = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    prepared = Prepared(BACKBONES[name], None, EXTREMES.get(image, torch.clone)(x), 2**-6)
    steps = [n for n in prepared.leaves if 'eta' in n or 'token_scale' in n]
    cancelling = [n for n in prepared.leaves if n.rpartition('.mixer.')[2] in CANCELLING]
    relu = any(isinstance(part, nn.ReLU) for part in prepared.module.modules())
    for dtype in TYPES:
        actual = prepared.run(dtype, device)
        # All cells of a map are equal, and one rounding may switch all of them off together.
        switched = relu and image != 'noise' and dtype != torch.float32
        if not switched:
            prepared.truth.assert_near(
                actual,
                dtype,
                cancelling=cancelling,
                skip=(*steps, 'x'),
                draws=1,
                roundings=ROUNDINGS_OF_A_BACKBONE,
            )
