"""Mixers of DiT³: given in any way, saved and loaded, left as they are, seen by the recorder."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmvttt.analysis.mixers import mixers_of
from mmvttt.models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer
from mmvttt.models.layers.inner_models import SwiGLU

pytest.importorskip('diffusers')
from mmvttt.models.generation.dit3 import DIT5, DiT3

SMALL = dict(embed_dims=24, num_layers=2, num_heads=2)
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


class Own(TTTMixer):
    """A subclass whose projection has a start of its own."""

    def __init__(self, embed_dims: int, num_heads: int) -> None:
        super().__init__(embed_dims, num_heads, inner='SwiGLU')
        nn.init.constant_(self.proj.weight, 2.0)


def build(mixer, **options) -> DiT3:
    return DiT3(arch=SMALL, num_classes=3, mixer=mixer, **options)


@pytest.mark.parametrize(
    ('mixer', 'kind'),
    [
        (None, ViT3Mixer),
        (dict(scale=0.5), ViT3Mixer),
        ('mmvttt.TTTLinearMixer', TTTLinearMixer),
        (TTTLinearMixer, TTTLinearMixer),
        (dict(type=TTTMixer, inner=SwiGLU), TTTMixer),
        (Constant, Constant),
        (dict(type=Constant, value=0.25), Constant),
    ],
)
def test_any_mixer_trains_saves_and_loads(mixer, kind: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(mixer)
    assert {type(block.mixer) for block in model.blocks} == {kind}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    out = model(LATENTS, ONE, ONE).sample
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    model.save_pretrained(tmp_path)
    # A file names mmvttt's own mixers; another is given again.
    foreign = dict(mixer=mixer) if kind is Constant else {}
    again = DiT3.from_pretrained(tmp_path, **foreign)
    assert torch.equal(again(LATENTS, ONE, ONE).sample, out)
    assert {type(block.mixer) for block in again.blocks} == {kind}


def test_options_of_the_default_mixer() -> None:
    assert {block.mixer.scale for block in build(dict(scale=0.5)).blocks} == {0.5}


def test_foreign_mixers_keep_their_start() -> None:
    for block in build(dict(type=Constant, value=0.25)).blocks:
        assert (block.mixer.linear.weight == 0.25).all()
        assert (block.mixer.norm.bias == 0.25).all()
    for block in build(Own).blocks:
        assert (block.mixer.proj.weight == 2).all()
    torch.manual_seed(0)
    alone = TTTLinearMixer(24, 2)
    for name, value in build(TTTLinearMixer).blocks[0].mixer.named_parameters():
        # The same kind of start: constants are the same, deviations alike (hundreds of numbers).
        start = alone.get_parameter(name)
        if start.numel() == 1 or start.std() == 0:
            assert torch.equal(value, start), name
        elif start.numel() > 300:
            assert value.std().item() == pytest.approx(start.std().item(), rel=0.25), name


def test_the_config_names_classes(tmp_path: Path) -> None:
    build(dict(type=Own)).save_config(tmp_path)
    saved = json.loads((tmp_path / 'config.json').read_text())
    assert saved['mixer'] == {'type': f'{__name__}:Own'}
    build(dict(type=TTTMixer, inner=SwiGLU)).save_config(tmp_path)
    saved = json.loads((tmp_path / 'config.json').read_text())
    assert saved['mixer'] == {'type': 'TTTMixer', 'inner': 'SwiGLU'}


def test_a_mixer_of_another_package_is_given_again(tmp_path: Path) -> None:
    build(Constant).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'mixer=.*Constant.*may only name'):
        DiT3.from_pretrained(tmp_path)


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match=r'cannot be written into config\.json'):
        build(dict(type=TTTMixer, inner=SwiGLU, loss=dict(type='l2', weight=object())))
    with pytest.raises(ValueError, match="mixer='ViT3Mixr' is not known, did you mean 'ViT3Mixer'"):
        build('ViT3Mixr')
    with pytest.raises(TypeError, match="did you mean 'scale'"):
        build(dict(scal=0.5))


@pytest.mark.parametrize('options', [{}, DIT5, dict(mixer=Constant)])
def test_the_recorder_finds_them(options: dict) -> None:
    assert list(mixers_of(DiT3(arch=SMALL, num_classes=3, **options))) == [
        'blocks.0.mixer',
        'blocks.1.mixer',
    ]
