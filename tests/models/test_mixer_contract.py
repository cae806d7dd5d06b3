"""Mixers of another package stand in every block of every backbone, or are refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmvttt.errors import OptionError
from mmvttt.models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer
from mmvttt.models.layers.inner_losses import INNER_LOSSES
from mmvttt.models.layers.inner_models import FC, INNER_MODELS, InnerModel

from .building import build_case as build

OWN = {'Vittt': TTTLinearMixer, 'ViT3': ViT3Mixer, 'T5': TTTMixer, 'HViT3': ViT3Mixer}
every_backbone = pytest.mark.parametrize('name', OWN)


class Mean(nn.Module):
    """The mean of all tokens, to each of them, and the arguments of the last call."""

    extras = ()

    def __init__(self, embed_dims: int, num_heads: int, gain: float = 1.0) -> None:
        super().__init__()
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.num_heads, self.gain = num_heads, gain

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        self.told = {'hw': hw}
        return self.gain * self.proj(x.mean(1, keepdim=True).expand_as(x))


class Placed(Mean):
    """Wants all that any backbone knows; each gives what it has."""

    extras = ('rotation', 'patches')

    def forward(
        self,
        x: Tensor,
        hw: tuple[int, int],
        rotation: Tensor | None = None,
        patches: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        out = super().forward(x, hw)
        self.told |= {'rotation': rotation, 'patches': patches, **rest}
        return out


def step(model: nn.Module) -> dict[str, Tensor]:
    """Maps and gradients of a training step on an image of awkward sides."""
    maps = model.train()(torch.randn(2, 3, 49, 70, generator=torch.Generator().manual_seed(1)))
    sum((m * torch.linspace(-1, 1, m.shape[-1])).mean() for m in maps).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return {**{f'map {i}': m.detach() for i, m in enumerate(maps)}, **gradients}


def mixers_of(model: nn.Module) -> list[nn.Module]:
    return [m for n, m in model.named_modules() if n.endswith('.mixer')]


def test_a_mixer_is_told_what_it_declares() -> None:
    told = {}
    for name in OWN:
        model = build(name, mixer=dict(type=Placed))
        step(model)
        told[name] = [m.told for m in mixers_of(model)]
    for name, every in told.items():
        for one in every:
            # Nothing goes to **rest.
            assert set(one) == {'hw', 'rotation', 'patches'}
            assert one['patches'] is None
            assert (one['rotation'] is not None) == (name == 'HViT3')
    rotations = [one['rotation'].shape for one in told['HViT3']]
    # Images of 49×70: maps of ⌈H/4⌉ × ⌈W/4⌉, halved from stage to stage, C / 2 turns a token.
    assert rotations == [(13 * 18, 8), *2 * [(7 * 9, 16)], (4 * 5, 24), (2 * 3, 32)]


def test_class_tokens_need_a_mixer_that_knows_of_them() -> None:
    model = build('Vittt', mixer=dict(type=Placed), cls_mode='middle')
    step(model)
    patches = [i for i in range(4 * 5 + 1) if i != 10]
    assert all(m.told['patches'].tolist() == patches for m in mixers_of(model))
    assert all(m.told['hw'] == (4, 5) for m in mixers_of(model))
    with pytest.raises(OptionError):
        build('Vittt', mixer=dict(type=Mean), cls_mode='middle')


@every_backbone
def test_another_type_has_no_option_of_the_default(name: str) -> None:
    """T⁵'s key norm, Vittt's gate: they are not for this mixer."""
    own = OWN[name]
    for mixer in (own, own.__name__, dict(type=f'mmvttt.{own.__name__}'), {}):
        assert str(build(name, mixer=mixer)) == str(build(name, mixer=None))
    other = TTTMixer if own is not TTTMixer else ViT3Mixer
    options = dict(inner=dict(type='FC')) if other is TTTMixer else {}
    model = build(name, mixer=dict(type=other, **options))
    assert all(type(m) is other for m in mixers_of(model))
    if other is TTTMixer:
        assert all(m.normalize_keys is None and m.q_conv is None for m in mixers_of(model))


class Louder:
    """A mixin whose function stands in front of the parent's in the order of inheritance."""

    def call(self, w: dict, x: Tensor, hw: tuple[int, int]) -> Tensor:
        return 2 * super().call(w, x, hw)


def test_an_op_is_for_its_own_model_and_loss_alone() -> None:
    """A subclass computes something else, and so does a loss of the same name."""

    def dot(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
        return -(predicted * value).sum()

    assert TTTMixer(16, 2, 'SwiGLU', loss=INNER_LOSSES['dot']).fused
    assert not TTTMixer(16, 2, type('Own', (Louder, INNER_MODELS['SwiGLU']), {})).fused
    assert not TTTMixer(16, 2, 'SwiGLU', loss=dot).fused


def test_a_mixer_without_positions_is_not_silent() -> None:
    with pytest.warns(UserWarning, match='rotation'):
        build('HViT3', mixer=lambda embed_dims, num_heads: nn.Identity())


def test_a_mixer_is_a_class_or_a_callable() -> None:
    for mixer, gain in ((Mean, 1), (partial(Mean, gain=3.0), 3), (dict(type=Mean, gain=3.0), 3)):
        model = build('HViT3', mixer=mixer)
        assert all(type(m) is Mean and m.gain == gain for m in mixers_of(model))


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, predicted: Tensor, value: Tensor, scale: float) -> Tensor:
        return self.weight * scale * (predicted - value).square().sum()


def test_a_loss_is_an_instance_and_a_norm_a_function_with_options() -> None:
    key_norm = dict(type=torch.mul, other=0.25)
    mixer = TTTMixer(16, 2, partial(FC), loss=dict(type=Weighted, weight=2.0), key_norm=key_norm)
    k = torch.randn(1, 6, 16)
    assert torch.equal(mixer.normalize_keys(k), k / 4)
    assert mixer.inner_loss(k, 0 * k, 1.0) == 2 * k.square().sum()
    assert mixer(k, (2, 3)).shape == k.shape


class Grouped(InnerModel):
    """One matrix for each half of the channels: three dimensions, no convolution."""

    axes = {'w1': ('group', 'in', 'out')}  # noqa: RUF012

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(2, head_dims // 2, head_dims // 2))

    def call(self, w: dict, x: Tensor, hw: tuple[int, int]) -> Tensor:
        return torch.einsum('ngi,gio->ngo', x.unflatten(-1, (2, -1)), w['w1']).flatten(-2)


def test_damping_goes_by_the_names_of_axes() -> None:
    mixer = TTTMixer(16, 2, Grouped, damping=True)
    gradient = torch.randn(3, 2, 2, 4, 4)
    norm = gradient.square().sum((-3, -2), keepdim=True).sqrt()
    torch.testing.assert_close(mixer._damped('w1', gradient), gradient / (norm + 1))
    unnamed = type('Unnamed', (Grouped,), dict(axes={}))
    with pytest.raises(OptionError):
        TTTMixer(16, 2, unnamed, damping=True)
    assert TTTMixer(16, 2, unnamed).options.damping is False


def test_an_inner_loss_is_a_number() -> None:
    def of_tokens(predicted: Tensor, values: Tensor, scale: float) -> Tensor:
        return scale * (predicted - values).square().sum(-1)

    tokens, hw = torch.randn(1, 6, 16), (2, 3)
    with pytest.raises(OptionError):
        TTTMixer(16, 2, dict(type='FC'), loss=of_tokens)(tokens, hw)
