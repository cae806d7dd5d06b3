"""Every token mixer in fp32, bf16 and fp16 against itself in fp64, from 1 to 66 800 tokens.

bf16 and fp16 are autocast, as in training. The bounds, `Truth.allowed`, are a few roundings of the
type; precision.py derives them.
"""

import copy

import pytest
import torch
from mixers import CANCELLING, DIMS, MIXERS, STEPS, T5, VIT3, VITTT, function_of, leaves_of
from precision import DEVICES, MAPS, OUTPUT, TYPES, Truth, evaluate

stress = pytest.mark.stress
# T⁵'s convolutions are torch's; Vittt's are an op of ours.
CONVOLUTIONS = ('q_conv', 'k_conv', 'v_conv')


def check(name: str, tokens: int, device: str, draws: int = 2) -> None:
    mixer, hw = MIXERS[name], MAPS[tokens]
    module = mixer.make()
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 1, tokens, DIMS, generator=generator)
    leaves = leaves_of(module, x)
    exact = copy.deepcopy(module).double()
    truth = Truth(function_of(mixer, exact, hw, torch.float64), leaves, grad)
    module.to(device)
    leaves = {n: v.to(device) for n, v in leaves.items()}
    for dtype in TYPES:
        actual = evaluate(function_of(mixer, module, hw, dtype, device), leaves, grad.to(device))
        assert actual[OUTPUT].dtype == dtype
        assert all(v.isfinite().all() for v in actual.values())
        # The step of a single token is almost all that its output consists of: what the LayerNorm
        # behind it lets through is the ε, and test_ops.py looks at that.
        skip = STEPS if tokens == 1 else ()
        torchs = CONVOLUTIONS if name in T5 and device == 'cpu' else ()
        sums = {n: tokens for n in leaves if n.partition('.')[0] in torchs}
        truth.assert_near(
            actual, dtype, cancelling=CANCELLING, one_by_one=sums, skip=skip, draws=draws
        )


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('tokens', [1, 63])
@pytest.mark.parametrize('name', MIXERS)
def test_output_and_every_gradient(name, tokens, device):
    check(name, tokens, device)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', {**VITTT, **VIT3})
def test_an_image_of_224_pixels(name, device):
    check(name, 196, device)


# torch's own LayerNorm sums the gradients of its weight and bias over the tokens in their type on a
# CPU: of thousands of tokens in bf16 little is left, with or without the mixer in front of it.
LONG = [name for name in MIXERS if name != 'Vittt, normed']


@stress
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', LONG)
def test_the_patches_of_a_detection_image(name, device):
    check(name, 4200, device)


@stress
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', LONG)
def test_a_detection_image_at_stride_4(name, device):
    check(name, 66_800, device, draws=1)
