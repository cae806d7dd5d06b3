"""The literal readings of Vision-TTT (docs/fidelity.md) do what they say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmvttt.models.backbones import Vittt
from mmvttt.models.backbones.vittt import VitttBlock
from mmvttt.models.layers import TTTLinearMixer

HW = (5, 7)


def block(residual: str, **mixer) -> tuple[VitttBlock, torch.Tensor]:
    torch.manual_seed(0)
    module = (
        VitttBlock(12, 2, 16, residual=residual, mixer=dict(type=TTTLinearMixer, **mixer))
        .double()
        .eval()
    )
    nn.init.normal_(module.conv2d.weight)
    return module, torch.randn(2, 35, 12, dtype=torch.float64)


def formula(b: VitttBlock, y: torch.Tensor, residual: str) -> torch.Tensor:
    """Eq. 9 with Eq. 12, or Algorithm 1, written out."""
    if residual == 'literal':
        y = y + b.mixer(b.conv2d(b.norm1(y), HW))
    else:
        y = b.conv2d(y, HW) + y
        x = b.norm1(y)
        y = b.mixer(x) + (x if residual == 'normed' else y)
    return y + b.mlp(b.norm2(y))


@pytest.mark.parametrize('residual', ['input', 'normed', 'literal'])
def test_residuals(residual: str) -> None:
    module, y = block(residual)
    torch.testing.assert_close(module(y, HW), formula(module, y, residual), rtol=0, atol=1e-12)


def test_class_tokens_skip_the_convolution() -> None:
    module, y = block('literal')
    mixed = []
    module.mixer.register_forward_hook(lambda _, inputs, __: mixed.append(inputs[0]))
    patches = torch.arange(1, 36)
    module(torch.cat([y[:, :1], y], 1), HW, patches)
    (x,) = mixed
    torch.testing.assert_close(x[:, 0], module.norm1(y)[:, 0])
    torch.testing.assert_close(x[:, 1:], module.conv2d(module.norm1(y), HW))


def test_no_token_scale_is_a_scale_of_one() -> None:
    torch.manual_seed(0)
    plain = TTTLinearMixer(16, 2, token_scale=None).double()
    assert 'token_scale' not in dict(plain.named_parameters())
    scaled = TTTLinearMixer(16, 2).double()
    scaled.load_state_dict(plain.state_dict(), strict=False)
    # 1/t + learned = 1.
    scaled.token_scale.data.copy_(1 - 1 / torch.arange(1, 17, dtype=torch.float64))
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    torch.testing.assert_close(plain(x), scaled(x), rtol=0, atol=1e-12)


def test_the_first_step_of_token_16() -> None:
    """4.9e-4 as the language-model layer, 1.0 to the letter (η = σ(0) = ½ at the start)."""
    steps = []
    for options in ({}, dict(eta_scale=2.0, token_scale=None)):
        mixer = TTTLinearMixer(64, 1, **options).double()
        scale = mixer.positional_scale()
        eta = mixer.scaled_eta(torch.zeros(1, 16, 64, dtype=torch.float64))[0, 15, 0, 0]
        steps.append((eta * (1 if scale is None else scale[0, 15])).item())
    assert steps == pytest.approx([1 / 2 / 64 / 16, 1.0])


@pytest.mark.parametrize('kind', ['GELU', 'Sigmoid'])
def test_the_gate_is_algorithm_1s_or_eq_11s(kind: str) -> None:
    torch.manual_seed(0)
    gated = TTTLinearMixer(16, 2, gate_cfg=dict(type=kind)).double()
    bare = TTTLinearMixer(16, 2).double()
    bare.load_state_dict(gated.state_dict(), strict=False)
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    actual = []
    for mixer in (gated, bare):
        mixer.proj.register_forward_hook(lambda _, inputs, __: actual.append(inputs[0]))
        mixer(x)
    gate = getattr(nn, kind)()(gated.gate(x))
    torch.testing.assert_close(actual[0], gate * actual[1], rtol=0, atol=1e-12)


def test_the_position_embedding_is_resized_as_the_weights_were_trained() -> None:
    stored = torch.randn(1, 14 * 14, 8)
    grid = stored.transpose(1, 2).unflatten(2, (14, 14))
    arch = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
    actual = {}
    for how, smooth in (('bicubic', False), ('antialiased', True)):
        model = Vittt(arch, img_size=(96, 160), pos_embed_interpolation=how)
        weights = dict(pos_embed=stored)
        model.adapt_weights(weights)
        actual[how] = weights['pos_embed']
        resized = F.interpolate(grid, (6, 10), mode='bicubic', antialias=smooth)
        torch.testing.assert_close(actual[how], resized.flatten(2).transpose(1, 2))
    assert not torch.allclose(actual['bicubic'], actual['antialiased'], atol=0.1)
    assert not Vittt(arch).antialias
    with pytest.raises(ValueError, match=r"pos_embed_interpolation='linear'.*bicubic"):
        Vittt(arch, pos_embed_interpolation='linear')


def test_weights_of_another_patch_size_see_the_enlarged_image() -> None:
    arch = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
    source, model = (Vittt(arch, img_size=8 * size, patch_size=size) for size in (4, 16))
    with pytest.raises(RuntimeError, match=r'size mismatch for patch_embed\.proj\.weight'):
        model.load_state_dict(source.state_dict())
    weights = source.state_dict()
    model.adapt_weights(weights)
    model.load_state_dict(weights)
    assert torch.equal(model.pos_embed, source.pos_embed)
    patch = torch.randn(2, 3, 4, 4)
    large = F.interpolate(patch, (16, 16), mode='bicubic', antialias=True)
    torch.testing.assert_close(
        model.patch_embed(large), source.patch_embed(patch), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ('options', 'words'),
    [(dict(eta_scale=0), 'eta_scale'), (dict(token_scale='fixed'), "token_scale='fixed'")],
)
def test_mistakes(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TTTLinearMixer(16, 2, **options)
