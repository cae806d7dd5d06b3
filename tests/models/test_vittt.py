"""Vittt against Tab. 3 of its paper, and its options; its literal readings (docs/fidelity.md)."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.models.backbones.vittt import CLASS_TOKENS, DESIGN_ROUTE, POOLING, Vittt, VitttBlock
from mmvttt.models.layers import TTTLinearMixer
from ttt_kernels import ttt_linear

from .building import build as build_model

# Three blocks of two heads: everything of the real model, at a size that a test can afford.
REDUCED = dict(embed_dims=64, num_layers=3, num_heads=2, feedforward_channels=96)


def reduced(**kwargs) -> Vittt:
    torch.manual_seed(0)
    return Vittt(REDUCED, img_size=64, **kwargs)


@pytest.mark.parametrize(
    ('design', 'params', 'flops'),
    [
        ('ttt_layer', 5.87, 1.14),
        ('share_qk', 5.43, 1.07),
        ('gating', 5.89, 1.15),
        ('conv1d', 5.90, 1.16),
        ('dual', 6.96, 1.42),
        ('conv2d', 6.98, 1.44),
    ],
)
def test_design_route_of_tab_3(design: str, params: float, flops: float) -> None:
    """Millions, and 10⁹ multiply-accumulates, with the linear head of Eq. 10."""
    with torch.device('meta'):
        model = Vittt('tiny', design=design)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 224, 224))
    head = model.embed_dims * 1000
    assert round((sum(p.numel() for p in model.parameters()) + head + 1000) / 1e6, 2) == params
    # The paper's figures turn out to leave the patch embedding out. The table is not
    # self-consistent (one shared D×D projection is 0.087G, 0.07G is printed).
    patches = 14 * 14 * model.patch_embed.proj.weight.numel()
    counted = counter.get_total_flops() / 2e9 + (head - patches) / 1e9
    assert counted == pytest.approx(flops, abs=0.02)


@pytest.mark.parametrize('design', DESIGN_ROUTE)
def test_every_parameter_gets_a_gradient(design: str) -> None:
    model = reduced(design=design)
    model(torch.randn(2, 3, 80, 64))[0].square().mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


def test_both_directions_add_up_to_the_single_ones() -> None:
    torch.manual_seed(0)
    dual = reduced(design='dual').blocks[0].mixer.double()
    x = torch.randn(2, 37, 64, dtype=torch.float64)
    parts = []
    for r, direction in enumerate(dual.directions):
        part = reduced(design='gating', mixer=dict(directions=(direction,))).blocks[0].mixer
        part.load_state_dict({k: _scan(k, v, r, dual) for k, v in dual.state_dict().items()})
        parts.append(part.double()(x))
    torch.testing.assert_close(dual(x), parts[0] + parts[1], rtol=0, atol=1e-12)


def _scan(name: str, value: torch.Tensor, r: int, mixer: nn.Module) -> torch.Tensor:
    """The part of direction r of a parameter of the mixer."""
    if name == 'proj.weight':
        return value
    if name != 'in_proj.weight':
        return value.chunk(2)[r]
    *views, gate, eta = value.split(mixer.widths)
    return torch.cat([*(x.chunk(2)[r] for x in views), gate, eta.chunk(2)[r]])


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
@pytest.mark.parametrize('out_type', ['featmap', 'avg_featmap'])
def test_classification_strategies_of_tab_4(cls_mode: str, out_type: str) -> None:
    model = reduced(cls_mode=cls_mode, out_type=out_type)
    out = model(torch.randn(2, 3, 48, 80))[0]
    assert out.shape == ((2, 64, 3, 5) if out_type == 'featmap' else (2, 64))
    tokens = 0 if model.cls_token is None else model.cls_token.shape[1]
    assert tokens == {'head': 1, 'middle': 1, 'double': 2}.get(cls_mode, 0)
    out.square().sum().backward()
    if out_type == 'avg_featmap':
        assert all(p.grad is not None for p in model.parameters())


def test_the_largest_token_is_pooled() -> None:
    x = torch.randn(2, 3, 64, 64)
    tokens = reduced().eval()(x)[0].flatten(2).transpose(1, 2)
    largest = reduced(out_type='avg_featmap', cls_mode='max').eval()(x)[0]
    expected = torch.stack([t[t.norm(dim=-1).argmax()] for t in tokens])
    torch.testing.assert_close(largest, expected)


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
        eta = mixer.project(torch.zeros(1, 16, 64, dtype=torch.float64))[3][0, 15, 0, 0]
        steps.append((eta * (1 if scale is None else scale[0, 15])).item())
    assert steps == pytest.approx([1 / 2 / 64 / 16, 1.0])


@pytest.mark.parametrize('kind', ['GELU', 'Sigmoid'])
def test_the_gate_is_algorithm_1s_or_eq_11s(kind: str) -> None:
    torch.manual_seed(0)
    gated = TTTLinearMixer(16, 2, gate_cfg=dict(type=kind)).double()
    bare = TTTLinearMixer(16, 2).double()
    weights = gated.state_dict()
    *views, _, eta = weights['in_proj.weight'].split(gated.widths)
    bare.load_state_dict({**weights, 'in_proj.weight': torch.cat([*views, eta])})
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    actual = []
    for mixer in (gated, bare):
        mixer.proj.register_forward_hook(lambda _, inputs, __: actual.append(inputs[0]))
        mixer(x)
    gate = getattr(nn, kind)()(gated.project(x)[4])
    torch.testing.assert_close(actual[0], gate * actual[1], rtol=0, atol=1e-12)


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


def test_the_middle_token_and_what_is_read_at_its_place() -> None:
    model = reduced(cls_mode='middle', out_type='avg_featmap').eval()
    x, extras = model.insert_tokens(torch.randn(2, 7, 64))
    assert torch.equal(x[:, 3], model.cls_token.expand(2, -1, -1)[:, 0])
    assert extras['patches'].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(model.to_output(x, (1, 7), **extras), x[:, 3])


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


def test_the_epsilon_of_the_inner_norm() -> None:
    """x + LN(W₀x) where the variance of W₀x is ε, 1e-6: half of the norm's usual size."""
    x = torch.tensor([1.0, -1.0]).expand(1, 1, 1, 1, 2)
    out = ttt_linear(
        *(x, x, x, torch.zeros(1, 1, 1, 1), 1e-3 * torch.eye(2)[None, None]),
        *(torch.zeros(1, 1, 2), torch.ones(1, 1, 2), torch.zeros(1, 1, 2), None),
        directions=('forward',),
        mini_batch_size=1,
    )
    torch.testing.assert_close(out, (1 + 0.5**0.5) * x)
