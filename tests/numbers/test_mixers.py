"""Every token mixer in fp32, bf16 and fp16 against itself in fp64, from 1 to 66 800 tokens.

bf16 and fp16 are autocast, as in training. The bounds, `Truth.allowed`, are a few roundings of the
type; precision.py derives them.

A mixer stands behind a LayerNorm and never meets loud, faint, zero or constant tokens in a
model; it must not matter. In fp16 the tokens between two layers are fp16: where one of them is
beyond its range in fp64 too, as products of tokens of 1e3 are, infinity is right and what follows
from it is not checked.
"""

import copy

import mixers
import pytest
import torch
from mixers import CANCELLING, DIMS, MIXERS, STEPS, T5, VIT3, VITTT
from precision import DEVICES, MAPS, OUTPUT, TYPES, Reach, Truth, evaluate, largest

stress = pytest.mark.stress
every_device = pytest.mark.parametrize('device', DEVICES)
# T⁵'s convolutions are torch's; Vittt's are an op of ours.
CONVOLUTIONS = ('q_conv', 'k_conv', 'v_conv')
EXTREMES = {
    'loud': lambda x: 1e3 * x,
    'faint': lambda x: 1e-6 * x,
    'zero': lambda x: 0 * x,
    'constant': torch.ones_like,
}
HALF = torch.float16


class Prepared:
    """A mixer, its leaves, the fp64 answer, and the largest number met on the way."""

    def __init__(self, name, tokens, change=torch.clone, size=1.0):
        self.mixer, self.hw = MIXERS[name], MAPS[tokens]
        self.module = self.mixer.make()
        generator = torch.Generator().manual_seed(1)
        x, grad = torch.randn(2, 1, tokens, DIMS, generator=generator)
        self.leaves = mixers.leaves_of(self.module, change(x))
        exact = copy.deepcopy(self.module).double()
        reach = Reach(exact)
        function = mixers.function_of(self.mixer, exact, self.hw, torch.float64)
        self.truth = Truth(function, self.leaves, size * grad)
        self.met = max(reach.forward, reach.backward, largest(tuple(self.truth.exact.values())))

    def run(self, dtype, device):
        function = mixers.function_of(self.mixer, self.module.to(device), self.hw, dtype, device)
        leaves = {n: x.to(device) for n, x in self.leaves.items()}
        actual = evaluate(function, leaves, self.truth.grad.float().to(device))
        assert all(x.isfinite().all() for x in actual.values())
        assert actual[OUTPUT].dtype == dtype
        return actual


def check(name, tokens, device, draws=2):
    prepared = Prepared(name, tokens)
    # The step of a single token is almost all that its output consists of: what the LayerNorm
    # behind it lets through is the ε, and test_ops.py looks at that.
    skip = STEPS if tokens == 1 else ()
    torchs = CONVOLUTIONS if name in T5 and device == 'cpu' else ()
    sums = {n: tokens for n in prepared.leaves if n.partition('.')[0] in torchs}
    for dtype in TYPES:
        prepared.truth.assert_near(
            prepared.run(dtype, device),
            dtype,
            cancelling=CANCELLING,
            one_by_one=sums,
            skip=skip,
            draws=draws,
        )


@every_device
@pytest.mark.parametrize('tokens', [1, 63])
@pytest.mark.parametrize('name', MIXERS)
def test_output_and_every_gradient(name, tokens, device):
    check(name, tokens, device)


@every_device
@pytest.mark.parametrize('name', {**VITTT, **VIT3})
def test_an_image_of_224_pixels(name, device):
    check(name, 196, device)


# torch's own LayerNorm sums the gradients of its weight and bias over the tokens in their type on a
# CPU: of thousands of tokens in bf16 little is left, with or without the mixer in front of it.
# Softmax attention is torch's, and takes 40 minutes for the longer one.
LONG = [name for name in MIXERS if name not in ('Vittt, normed', 'softmax attention')]


# The patches of a detection image, and the image at stride 4.
@stress
@every_device
@pytest.mark.parametrize(('tokens', 'draws'), [(4200, 2), (66_800, 1)])
@pytest.mark.parametrize('name', LONG)
def test_a_detection_image(name, tokens, draws, device):
    check(name, tokens, device, draws)


@pytest.fixture
def references(monkeypatch):
    """The fp16 kernels have a smaller range than fp16 tokens; test_ops.py is about them."""
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'reference')


@every_device
@pytest.mark.parametrize(
    ('extreme', 'tokens'), [*((extreme, 63) for extreme in EXTREMES), ('loud', 1), ('zero', 1)]
)
@pytest.mark.parametrize('name', MIXERS)
def test_finite_and_near_at_extremes(name, extreme, tokens, device, references):
    prepared = Prepared(name, tokens, EXTREMES[extreme], 2**-6)
    if prepared.met > torch.finfo(torch.float32).max:
        # Eight steps of 1 on loud tokens leave no number in any type.
        assert (name, extreme) == ('two epochs of four', 'loud')
        return
    for dtype in TYPES:
        if dtype == HALF and prepared.met > torch.finfo(HALF).max:
            continue
        actual = prepared.run(dtype, device)
        # One loud token is all that its own model is trained on, and what is left of its gradients
        # is the difference of equals; of faint ones fp16 keeps no digits.
        if tokens > 1 and not (dtype == HALF and extreme == 'faint'):
            skip = (*STEPS, *mixers.SATURATED.get(name, ())) if extreme == 'loud' else STEPS
            prepared.truth.assert_near(actual, dtype, cancelling=CANCELLING, skip=skip, draws=1)


@every_device
@pytest.mark.parametrize('name', MIXERS)
def test_as_loud_as_fits_fp16(name, device, references):
    for power in range(10, -3, -1):
        prepared = Prepared(name, 63, lambda x, factor=2.0**power: factor * x, 2**-6)
        if prepared.met < torch.finfo(HALF).max / 2:
            break
    else:
        raise AssertionError(f'{prepared.met} is met for tokens of 1/4')
    skip = (*STEPS, *mixers.SATURATED.get(name, ()))
    prepared.truth.assert_near(prepared.run(HALF, device), HALF, cancelling=CANCELLING, skip=skip)
