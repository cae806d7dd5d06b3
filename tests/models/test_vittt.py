"""Vittt against Tab. 3 of its paper, and its options; its literal readings (docs/fidelity.md)."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.models.backbones.vittt import CLASS_TOKENS, POOLING, Vittt, VitttBlock
from mmvttt.models.layers import TTTLinearMixer

from .building import build as build_model

# Three blocks of two heads: everything of the real model, at a size that a test can afford.
REDUCED = dict(embed_dims=64, num_layers=3, num_heads=2, feedforward_channels=96)


def reduced(**kwargs) -> Vittt:
    torch.manual_seed(0)
    return Vittt(REDUCED, img_size=64, **kwargs)


@pytest.mark.parametrize('design', ['ttt_layer', 'share_qk', 'conv2d'])
def test_files_from_before_in_proj_are_read(design: str, tmp_path: Path) -> None:
    """They have qkv, gate and η apart, and the rows of qkv by scan, then by q, k and v."""
    source = reduced(design=design)
    weights = {n: torch.randn_like(x) for n, x in source.state_dict().items()}
    source.load_state_dict(weights)
    for name in [n.removesuffix('in_proj.weight') for n in weights if 'in_proj' in n]:
        mixer = source.get_submodule(name.rstrip('.'))
        *views, gate, eta = weights.pop(f'{name}in_proj.weight').split(mixer.widths)
        qkv = torch.stack([x.unflatten(0, (len(mixer.directions), -1)) for x in views], 1)
        old = {'qkv': qkv.flatten(0, 2), 'eta': eta, **({'gate': gate} if len(gate) else {})}
        weights |= {f'{name}{key}.weight': x for key, x in old.items()}
        weights[f'{name}eta.bias'] = weights.pop(f'{name}eta_bias')
    torch.save(weights, tmp_path / 'old.pth')
    plain, loaded = reduced(design=design), reduced(design=design)
    copy.deepcopy(plain).load_state_dict(weights)
    plain.load_state_dict(weights)
    assert not load_pretrained(loaded, tmp_path / 'old.pth').missing
    for model in (plain, loaded):
        for name, value in source.state_dict().items():
            assert torch.equal(model.get_parameter(name), value), name


@pytest.mark.parametrize(('learnable', 'count'), [(2, 2), (1, 1), (0, 0)])
def test_learnable_states_of_fig_7b(learnable: int, count: int) -> None:
    mixer = reduced(mixer=dict(learnable_states=learnable)).blocks[0].mixer
    names = [n for n, _ in mixer.named_parameters() if n in ('w0', 'b0')]
    assert len(names) == (2 if count else 0)
    assert mixer.w0.shape[0] == (count or 2)
    mixer(torch.randn(1, 20, 64)).sum().backward()
    assert all(mixer.get_parameter(n).grad.any() for n in names)
    assert 'w0' in mixer.state_dict()


@pytest.mark.parametrize('cls_mode', POOLING + CLASS_TOKENS)
def test_classification_strategies_of_tab_4(cls_mode: str) -> None:
    """Where class tokens stand, and the feature that is read off the normed tokens."""
    model = reduced(cls_mode=cls_mode, out_type='avg_featmap')
    x = torch.randn(2, 7, 64)
    tokens, extras = model.insert_tokens(x)
    at = {'head': [0], 'middle': [3], 'double': [0, 8]}.get(cls_mode, [])
    patches = [i for i in range(7 + len(at)) if i not in at]
    assert torch.equal(tokens[:, patches], x)
    feature = model.to_output(tokens, (1, 7), **extras)
    if at:
        assert extras['patches'].tolist() == patches
        assert torch.equal(tokens[:, at], model.cls_token.expand(2, -1, -1))
        torch.testing.assert_close(feature, model.cls_token.mean(1).expand(2, -1))
    elif cls_mode == 'mean':
        torch.testing.assert_close(feature, x.mean(1))
    else:
        assert torch.equal(feature, torch.stack([t[t.norm(dim=-1).argmax()] for t in x]))
    model(torch.randn(2, 3, 48, 80))[0].square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    maps = reduced(cls_mode=cls_mode)(torch.randn(2, 3, 48, 80))
    assert maps[0].shape == (2, 64, 3, 5)


@pytest.mark.parametrize('backbone', ['Vittt', 'ViT3', 'T5'])
def test_the_final_norm_is_for_the_last_block_alone(backbone: str) -> None:
    arch = dict(REDUCED, num_layers=2)
    config = dict(type=f'mmvttt.{backbone}', arch=arch, out_indices=(0, 1))
    model = build_model(config).eval()
    nn.init.normal_(model.norm.weight)
    x = torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        tokens, hw = model.embed(x)
        first = model.run_block(0, tokens, hw)
        last = model.norm(model.run_block(1, first, hw))
        for actual, expected in zip(model(x), (first, last), strict=True):
            assert torch.equal(actual.flatten(2).mT, expected)


HW = (5, 7)


@pytest.mark.parametrize('residual', ['input', 'normed', 'literal'])
def test_residuals(residual: str) -> None:
    """Eq. 9 with Eq. 12, or Algorithm 1; class tokens skip the convolution."""
    block = VitttBlock(12, 2, 16, dict(type=TTTLinearMixer), residual=residual).double()
    nn.init.normal_(block.conv2d.weight)
    tokens = torch.randn(2, 35, 12, dtype=torch.float64)
    for classes, patches in ((0, None), (1, torch.arange(1, 36))):
        y = torch.cat([tokens[:, :classes], tokens], 1)

        def conv(x: torch.Tensor, n: int = classes) -> torch.Tensor:
            return torch.cat([torch.zeros_like(x[:, :n]), block.conv2d(x[:, n:], HW)], 1)

        if residual == 'literal':
            normed = block.norm1(y)
            mixed = torch.cat([normed[:, :classes], conv(normed)[:, classes:]], 1)
            expected = y + block.mixer(mixed)
        else:
            middle = conv(y) + y
            x = block.norm1(middle)
            expected = block.mixer(x) + (x if residual == 'normed' else middle)
        expected = expected + block.mlp(block.norm2(expected))
        torch.testing.assert_close(block(y, HW, patches), expected, rtol=0, atol=1e-12)


def test_the_first_step_of_token_16() -> None:
    """4.9e-4 as the language-model layer, 1.0 to the letter (η = σ(0) = ½ at the start)."""
    steps = []
    for options in ({}, dict(eta_base=3.0), dict(eta_scale=2.0, token_scale=None)):
        mixer = TTTLinearMixer(64, 1, **options).double()
        scale = mixer.positional_scale()
        eta = mixer.project(torch.zeros(1, 16, 64, dtype=torch.float64))[3][0, 15, 0, 0]
        steps.append((eta * (1 if scale is None else scale[0, 15])).item())
    assert steps == pytest.approx([1 / 2 / 64 / 16, 3 / 2 / 64 / 16, 1.0])


@pytest.mark.parametrize('kind', ['GELU', 'Sigmoid'])
def test_the_gate_is_algorithm_1s_or_eq_11s(kind: str) -> None:
    torch.manual_seed(0)
    mixer = TTTLinearMixer(16, 2, gate_cfg=dict(type=kind)).double()
    outs = []
    mixer.proj.register_forward_hook(lambda _, inputs, __: outs.append(inputs[0]))
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    mixer(x)
    gate = getattr(nn, kind)()(mixer.project(x)[4])
    mixer.gate_act = None
    mixer(x)
    gated, bare = outs
    torch.testing.assert_close(gated, gate * bare, rtol=1e-9, atol=0)


@pytest.mark.parametrize(('backbone', 'antialias'), [('Vittt', False), ('ViT3', True)])
def test_positions_are_resized_as_the_weights_were_trained(backbone: str, antialias: bool) -> None:
    """Vittt's as in the original ViT-Adapter, others' as in timm."""
    stored = torch.randn(1, 14 * 14, 64)
    grid = stored.transpose(1, 2).unflatten(2, (14, 14))
    options = dict(type=backbone, arch=REDUCED, img_size=(96, 160), pos_embed=True)
    weights = dict(pos_embed=stored)
    build_model(options).adapt_weights(weights)
    resized = F.interpolate(grid, (6, 10), mode='bicubic', antialias=antialias)
    torch.testing.assert_close(weights['pos_embed'], resized.flatten(2).transpose(1, 2))


def test_weights_of_another_patch_size_see_the_enlarged_image() -> None:
    arch = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
    source, model = (Vittt(arch, img_size=8 * size, patch_size=size) for size in (4, 16))
    with pytest.raises(RuntimeError):
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


@pytest.mark.parametrize('taps', [0, 1])
def test_views_and_steps_of_a_mixer(taps: int) -> None:
    """Queries, keys and values are the projection's in this order; η = σ(…) / d of a head."""
    mixer = TTTLinearMixer(32, 2, directions=['forward'], share_qk=False, conv_kernel=taps)
    x = torch.randn(1, 5, 32)
    *views, eta = F.linear(x, mixer.in_proj.weight).split([32, 32, 32, 2], -1)
    if taps:
        # A convolution of one tap is a gain.
        views[:2] = (
            view * conv.weight[0, :, 0]
            for view, conv in zip(views, (mixer.q_conv, mixer.k_conv), strict=False)
        )
    *actual, steps, _ = mixer.project(x)
    for one, view in zip(actual, views, strict=True):
        torch.testing.assert_close(one, view.unflatten(-1, (1, 2, 16)))
    torch.testing.assert_close(steps, eta.sigmoid().unflatten(-1, (1, 2)) / 16)
