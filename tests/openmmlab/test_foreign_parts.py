"""Registered mixers and inner parts of other packages, by name."""

import copy

import pytest
import torch
from mmengine.registry import MODELS as ROOT
from mmengine.registry import Registry
from torch import Tensor

from mmvttt.models import ViT3
from mmvttt.models.layers import InnerModel, TTTMixer, ViT3Mixer
from mmvttt.models.layers.mixer import resolve_mixer
from mmvttt.openmmlab.registry import INNER_LOSSES, INNER_MODELS, KEY_NORMS

from ..models.building import CASES, OWN
from ..models.test_mixer_contract import Mean, mixers_of, step

FOREIGN = Registry('model', parent=ROOT, scope='foreign')
FOREIGN.register_module(module=Mean)


def build(name: str, mixer: object, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = copy.deepcopy(CASES[name])
    config.get('backbone', config).update(mixer=mixer, **options)
    return ROOT.build(config)


@pytest.mark.parametrize('name', [*OWN, 'ViTAdapter'])
@pytest.mark.parametrize('mixer', ['foreign.Mean', dict(type='foreign.Mean')])
def test_it_stands_in_every_block(name: str, mixer: object) -> None:
    model = build(name, mixer)
    assert {type(m) for m in mixers_of(model)} == {Mean}
    assert all(v is not None and v.isfinite().all() for v in step(model).values())


def test_the_library_finds_it_too_once_the_door_is_open() -> None:
    arch = dict(embed_dims=32, num_layers=1, num_heads=2, feedforward_channels=48)
    model = ViT3(arch, mixer=dict(type='foreign.Mean', gain=2.0))
    assert type(model.blocks[0].mixer) is Mean


def test_below_another_default_scope() -> None:
    with ROOT.switch_scope_and_registry('foreign'):
        assert resolve_mixer(dict(type='Mean'), dict(type='mmvttt.ViT3Mixer'))['type'] is Mean
        assert resolve_mixer(None, dict(type='mmvttt.ViT3Mixer'))['type'] is ViT3Mixer
        assert resolve_mixer(dict(type='ViT3Mixer'), dict(type=TTTMixer))['type'] is ViT3Mixer


def test_the_parts_of_an_inner_training_have_registries_too() -> None:
    scope = 'foreign_parts'
    models, losses, norms = (
        Registry(parent.name, parent=parent, scope=scope)
        for parent in (INNER_MODELS, INNER_LOSSES, KEY_NORMS)
    )

    @models.register_module()
    class Tanh2(InnerModel):
        def __init__(self, num_heads: int, head_dims: int) -> None:
            super().__init__(
                num_heads, w1=(head_dims, 2 * head_dims), w2=(2 * head_dims, head_dims)
            )

        def call(self, w: dict, x: Tensor, hw: tuple[int, int]) -> Tensor:
            return (x @ w['w1']).tanh() @ w['w2']

    @losses.register_module()
    def quartic(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
        return scale * (predicted - value).pow(4).mean()

    @norms.register_module()
    def halved(k: Tensor) -> Tensor:
        return k / 2

    named = dict(inner=dict(type=f'{scope}.Tanh2'), loss=f'{scope}.quartic')
    given = dict(inner=dict(type=Tanh2), loss=quartic, key_norm=halved)
    out = []
    for options in (dict(named, key_norm=f'{scope}.halved'), given):
        mixer = dict(type='mmvttt.TTTMixer', **options)
        model = build('ViT3', mixer)
        assert isinstance(model.blocks[0].mixer.inner, Tanh2)
        out.append(step(model))
        recomputed = step(build('ViT3', mixer, with_cp=True))
        assert all(torch.equal(recomputed[n], v) for n, v in out[0].items())
    assert all(torch.equal(out[0][n], out[1][n]) for n in out[0])
    assert all(v.any() for n, v in out[0].items() if '.inner.' in n)
