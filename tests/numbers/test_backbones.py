"""Whole backbones on constant, zero, loud and faint images, in fp32, bf16 and fp16."""

import copy

import pytest
import torch
from mixers import CANCELLING
from precision import DEVICES, OUTPUT, ROUNDINGS, TYPES, Reach, Truth, evaluate, largest
from torch import nn
from torch.func import functional_call

from ..models.building import build

PLAIN = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=96)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4))
VITTT = dict(type='mmvttt.Vittt', arch=PLAIN, img_size=64)
VIT3 = dict(type='mmvttt.ViT3', arch=PLAIN)
T5 = dict(type='mmvttt.T5', arch=PLAIN, img_size=64, mixer=dict(neighborhood=3))
ADAPTER = dict(
    type='mmvttt.ViTAdapter', conv_inplane=16, norm_layer=dict(type='BN'), init_values=0.5
)
BACKBONES = {
    'Vittt': VITTT,
    'ViT3': VIT3,
    'T5+': T5,
    'HViT3': dict(type='mmvttt.HViT3', arch=STAGES),
    'ViTAdapter of Vittt': dict(ADAPTER, backbone=VITTT),
    'ViTAdapter of ViT3': dict(ADAPTER, backbone=VIT3),
}
# Blocks one after the other, each with a mixer's number of layers before and after the mixer.
ROUNDINGS_OF_A_BACKBONE = {dtype: 4 * n for dtype, n in ROUNDINGS.items()}
IMAGES = {
    'noise': lambda x: x,
    'zero': torch.zeros_like,
    'constant': lambda x: torch.full_like(x, 0.7),
    'loud constant': lambda x: torch.full_like(x, 1e3),
    'loud': lambda x: 1e3 * x,
    'faint': lambda x: 1e-6 * x,
}


class Prepared:
    """A backbone, an image, and the fp64 answer to it."""

    def __init__(self, name: str, image: str, training: bool) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = build(BACKBONES[name]).train(training)
        self.image = IMAGES[image](torch.randn(1, 3, 64, 96))
        self.leaves = {n: p.detach() for n, p in self.module.named_parameters()}
        exact = copy.deepcopy(self.module).double()
        function = self.function(exact, torch.float64, 'cpu')
        with torch.no_grad():
            size = function({n: x.double() for n, x in self.leaves.items()}).shape
        # As from a mean over the cells of the maps.
        self.grad = 2**-6 * torch.randn(size)
        self.reach = Reach(exact)
        self.truth = Truth(function, self.leaves, self.grad)

    def function(self, module, dtype, device):
        image = self.image.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        half = dtype in (torch.bfloat16, torch.float16)

        def function(leaves):
            with torch.autocast(device, dtype if half else torch.bfloat16, enabled=half):
                maps = functional_call(module, leaves, (image,))
            return torch.cat([x.flatten(1) for x in maps], dim=1)

        return function

    def run(self, dtype, device):
        leaves = {n: x.to(device) for n, x in self.leaves.items()}
        function = self.function(self.module.to(device), dtype, device)
        return evaluate(function, leaves, self.grad.to(device))


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('image', ['zero', 'loud constant', 'faint'])
@pytest.mark.parametrize('name', BACKBONES)
def test_training_is_finite(name, image, device):
    prepared = Prepared(name, image, training=True)
    reach = max(prepared.reach.backward, largest(tuple(prepared.truth.exact.values())))
    for dtype in TYPES:
        actual = prepared.run(dtype, device)
        assert actual[OUTPUT].isfinite().all()
        # The gradient behind a BatchNorm of faint maps is beyond fp16, for which there is the scale
        # of the loss.
        if reach < torch.finfo(dtype).max:
            assert [n for n, x in actual.items() if not x.isfinite().all()] == []
        else:
            assert (image, dtype) == ('faint', torch.float16)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('image', ['noise', 'zero', 'constant', 'loud', 'faint'])
@pytest.mark.parametrize('name', BACKBONES)
def test_output_and_every_gradient(name, image, device):
    # Without the statistics of a batch, which make a signal of the rounding of a constant image.
    prepared = Prepared(name, image, training=False)
    steps = [n for n in prepared.leaves if 'eta' in n or 'token_scale' in n]
    cancelling = [n for n in prepared.leaves if n.rpartition('.mixer.')[2] in CANCELLING]
    for dtype in TYPES:
        if dtype == torch.float16 and image in ('faint', 'loud', 'loud constant'):
            # Tokens, or gradients in front of a LayerNorm of loud ones, of which fp16 keeps no
            # digits.
            continue
        if dtype != torch.float32 and image not in ('noise', 'loud') and has_relu(prepared.module):
            # All cells of a map are equal, and one rounding may switch all of them off together.
            continue
        prepared.truth.assert_near(
            prepared.run(dtype, device),
            dtype,
            cancelling=cancelling,
            skip=steps,
            draws=1,
            roundings=ROUNDINGS_OF_A_BACKBONE,
        )


def has_relu(module):
    return any(isinstance(part, nn.ReLU) for part in module.modules())
