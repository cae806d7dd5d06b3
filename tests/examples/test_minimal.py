"""The one-page blocks of examples/ compute what the backbones compute, with their weights."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from mmvttt.models.backbones import ViT3, Vittt

from ..models.building import shaken
from ..processes import run

EXAMPLES = Path(__file__).parents[2] / 'examples'
ARCH = dict(embed_dims=48, num_layers=1, num_heads=3, feedforward_channels=64)
BACKBONES = {'minimal_vittt': Vittt, 'minimal_vit3': ViT3}


# One token, less than a mini-batch, whole ones, and one token more.
@pytest.mark.parametrize('hw', [(1, 1), (3, 5), (4, 8), (3, 11)])
@pytest.mark.parametrize('name', BACKBONES)
def test_a_block_is_the_backbone_s(name: str, hw: tuple[int, int]) -> None:
    torch.manual_seed(0)
    source = shaken(BACKBONES[name](ARCH).blocks[0].double())
    block = runpy.run_path(str(EXAMPLES / f'{name}.py'))['Block'](48, 3, 64).double()
    block.load_state_dict(source.state_dict())
    x = torch.randn(2, hw[0] * hw[1], 48, dtype=torch.float64)
    made, expected = block(x, hw), source(x, hw)
    # The same sums in another order.
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)
    ramp = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    (made * ramp).sum().backward()
    (expected * ramp).sum().backward()
    for key, weight in source.named_parameters():
        gradient = block.get_parameter(key).grad
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-8, atol=1e-8, msg=key)


@pytest.mark.parametrize('name', BACKBONES)
def test_it_runs(name: str) -> None:
    done = run(sys.executable, EXAMPLES / f'{name}.py')
    assert done.stdout.startswith('(2, 196, 192)'), done.stderr
