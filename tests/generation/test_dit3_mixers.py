"""Mixers of DiT³: given in any way, saved and loaded, left as they are, seen by the recorder."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmvttt.analysis.mixers import record_mixers
from mmvttt.errors import OptionError
from mmvttt.models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer
from mmvttt.models.layers.inner_models import SwiGLU

pytest.importorskip('diffusers')
from mmvttt.models.generation.dit3 import DIT5, DiT3

from ..models.building import shaken
from .small import SMALL, model

LATENTS, ONE = torch.randn(2, 4, 6, 10), torch.tensor([1, 2])


class Constant(nn.Module):
    """A mixer of another package, whose linear layer has a start of its own, and no bias."""

    def __init__(self, embed_dims: int, num_heads: int, value: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(embed_dims, embed_dims, bias=False)
        self.norm = nn.LayerNorm(embed_dims)
        nn.init.constant_(self.linear.weight, value)
        nn.init.constant_(self.norm.bias, value)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        return self.norm(self.linear(x))


def build(mixer, **options) -> DiT3:
    return DiT3(arch=SMALL, num_classes=3, mixer=mixer, **options)


@pytest.mark.parametrize(
    ('mixer', 'kind', 'written'),
    [
        (None, ViT3Mixer, None),
        (dict(scale=0.5), ViT3Mixer, {'scale': 0.5}),
        ('mmvttt.TTTLinearMixer', TTTLinearMixer, 'mmvttt.TTTLinearMixer'),
        (TTTLinearMixer, TTTLinearMixer, 'TTTLinearMixer'),
        (dict(type=TTTMixer, inner=SwiGLU), TTTMixer, {'type': 'TTTMixer', 'inner': 'SwiGLU'}),
        (dict(type=Constant, value=0.5), Constant, {'type': f'{__name__}:Constant', 'value': 0.5}),
    ],
)
def test_any_mixer_trains_saves_and_loads(mixer, kind: type, written, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = shaken(build(mixer))
    assert {type(block.mixer) for block in network.blocks} == {kind}
    out = network(LATENTS, ONE, ONE).sample
    out.square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
    network.save_pretrained(tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['mixer'] == written
    # A file names mmvttt's own mixers; another is given again.
    foreign = kind is Constant
    if foreign:
        with pytest.raises(OptionError):
            DiT3.from_pretrained(tmp_path)
    again = DiT3.from_pretrained(tmp_path, **(dict(mixer=mixer) if foreign else {}))
    assert torch.equal(again(LATENTS, ONE, ONE).sample, out)
    ours = {k: v for k, v in network.config.items() if not k.startswith('_') and k != 'mixer'}
    assert ours == {k: again.config[k] for k in ours}


def test_options_and_start_of_mixers() -> None:
    assert {block.mixer.scale for block in build(dict(scale=0.5)).blocks} == {0.5}
    for block in build(dict(type=Constant, value=0.25)).blocks:
        assert (block.mixer.linear.weight == 0.25).all()
        assert (block.mixer.norm.bias == 0.25).all()
    torch.manual_seed(0)
    alone = TTTLinearMixer(24, 2)
    for name, value in build(TTTLinearMixer).blocks[0].mixer.named_parameters():
        # The same kind of start: constants are the same, deviations alike (hundreds of numbers).
        start = alone.get_parameter(name)
        if start.numel() == 1 or start.std() == 0:
            assert torch.equal(value, start), name
        elif start.numel() > 300:
            assert value.std().item() == pytest.approx(start.std().item(), rel=0.25), name


@pytest.mark.parametrize(
    'options',
    [
        dict(arch='huge'),
        dict(patch_size=0),
        dict(mixer='ViT3Mixr'),
        dict(mixer=dict(scal=0.5)),
        dict(mixer=dict(type=TTTMixer, inner=SwiGLU, loss=dict(type='l2', weight=object()))),
    ],
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(OptionError):
        DiT3(**options)


@pytest.mark.parametrize('options', [{}, dict(mixer=DIT5['mixer']), dict(mixer=Constant)])
def test_mixers_of_a_diffusion_model_are_recorded(options: dict) -> None:
    models = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS
    network = models.build(model(transformer=options))
    ran = record_mixers(network, torch.randn(2, 1, 20, 24))
    assert [r.name for r in ran] == ['transformer.blocks.0.mixer', 'transformer.blocks.1.mixer']
    assert {r.hw for r in ran} == {(5, 6)}
    assert all(r.x.shape == (2, 30, 24) and (r.ops or 'mixer' in options) for r in ran)
