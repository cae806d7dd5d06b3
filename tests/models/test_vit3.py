"""ViT³ against the numbers of its paper and public code; the contract of the plain backbones."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.backbones import ViT3
from mmvttt.models.layers import ViT3Mixer, rotate, rotation_2d

from .building import build as build_model

REDUCED = dict(embed_dims=48, num_layers=3, num_heads=3, feedforward_channels=96)
CLASSES = 1000


def reduced(**kwargs) -> ViT3:
    torch.manual_seed(0)
    return ViT3(**{'arch': REDUCED, **kwargs})


@pytest.mark.parametrize(
    ('arch', 'params', 'flops'),
    [('tiny', 6.1494, 1.2235), ('small', 23.7994, 4.817), ('base', 90.0559, 17.956)],
)
def test_sizes_of_tab_7(arch: str, params: float, flops: float) -> None:
    with torch.device('meta'):
        model = ViT3(arch)
        images = torch.empty(1, 3, 224, 224)
    head = model.embed_dims * CLASSES
    count = sum(p.numel() for p in model.parameters()) + head + CLASSES
    assert round(count / 1e6, 4) == params
    with FlopCounterMode(display=False) as counter:
        model(images)
    # The public count has about one more pass over the tokens than our matrix products and
    # convolutions: 0.1 % to 0.4 %.
    assert counter.get_total_flops() / 2e9 + head / 1e9 == pytest.approx(flops, rel=0.005)


def test_flops_are_linear_in_the_number_of_patches() -> None:
    with torch.device('meta'):
        model = ViT3('tiny')
        counts = []
        for side in (320, 1280):
            with FlopCounterMode(display=False) as counter:
                model(torch.empty(1, 3, side, side))
            counts.append(counter.get_total_flops())
    assert counts[1] == 16 * counts[0]


@pytest.mark.parametrize('size', [(16, 16), (31, 31), (225, 333), (17, 200)])
def test_any_image_of_a_patch_or_more(size: tuple[int, int]) -> None:
    model = reduced(out_indices=(0, -1)).eval()
    with torch.no_grad():
        outs = model(torch.randn(2, 3, *size))
    grid = (math.ceil(size[0] / 16), math.ceil(size[1] / 16))
    assert [tuple(out.shape) for out in outs] == [(2, 48, *grid)] * 2
    assert all(out.isfinite().all() for out in outs)


def test_every_parameter_gets_a_gradient_and_checkpointing_changes_none() -> None:
    x = torch.randn(2, 3, 80, 64)
    grads = []
    for with_cp in (False, True):
        model = reduced(with_cp=with_cp)
        model(x)[0].square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert all(g is not None and g.any() for g in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=0, atol=0, msg=name)


def test_pooled_is_the_mean_of_the_normed_tokens() -> None:
    x = torch.randn(2, 3, 40, 64)
    with torch.no_grad():
        featmap, pooled = reduced().eval()(x)[0], reduced(out_type='avg_featmap').eval()(x)[0]
    torch.testing.assert_close(pooled, featmap.mean((2, 3)))


def test_the_order_of_tokens_and_the_layout_of_memory() -> None:
    model = reduced().eval()
    x = torch.randn(2, 3, 64, 80)
    with torch.no_grad():
        maps = model(x)[0]
        alone = torch.cat([model(image[None])[0] for image in x])
        channels_last = model(x.to(memory_format=torch.channels_last))[0]
        tokens, hw = model.embed(x)
    # fp32, another order of sums.
    torch.testing.assert_close(maps, alone, rtol=0, atol=2e-5)
    torch.testing.assert_close(maps, channels_last, rtol=0, atol=2e-5)
    assert hw == (4, 5)
    assert tokens.is_contiguous()


def test_the_mixer_is_global_and_knows_neighbours() -> None:
    """One key changes every token's output; the convolution tells neighbours from others."""
    torch.manual_seed(0)
    mixer = ViT3Mixer(32, 2).double()
    for weight in (mixer.qkv.weight, mixer.w1, mixer.w2, mixer.w3):
        nn.init.normal_(weight, std=0.3)
    x = torch.randn(1, 35, 32, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(mixer(x, (5, 7))[0, 17].sum(), x)
    assert (grad.abs().sum(-1) > 0).all()
    turned = x.detach().view(1, 5, 7, 32).transpose(1, 2).flatten(1, 2)
    transposed = mixer(turned, (7, 5)).view(1, 7, 5, 32).transpose(1, 2).flatten(1, 2)
    assert not torch.allclose(transposed, mixer(x, (5, 7)), atol=1e-6)


def test_starting_values() -> None:
    mixer = ViT3Mixer(384, 6)
    for weight in (mixer.qkv.weight, mixer.w1, mixer.w2, mixer.w3):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert not mixer.qkv.bias.any()
    assert not mixer.proj.bias.any()


@pytest.mark.parametrize('hw', [(1, 1), (3, 5)])
def test_rotary_positions(hw: tuple[int, int]) -> None:
    turns = rotation_2d(hw, 16, dtype=torch.float64)
    assert turns.shape == (hw[0] * hw[1], 8)
    torch.testing.assert_close(turns.abs(), torch.ones_like(turns.abs()))
    angles = [10000 ** (-j / 4) for j in range(4)]
    row, column = hw[0] - 1, hw[1] - 1
    expected = torch.tensor([row * a for a in angles] + [column * a for a in angles])
    torch.testing.assert_close(
        turns[-1], torch.polar(torch.ones(8), expected).to(turns.dtype), rtol=0, atol=1e-6
    )
    # The product of a query and a key depends on how far apart they are.
    q, k = (torch.randn(1, 1, 16, dtype=torch.float64) for _ in range(2))
    if hw == (3, 5):
        q, k = (rotate(x.expand(1, 15, 16), turns)[0] for x in (q, k))
        near = (q * k.roll(-6, 0)).sum(-1)[[0, 1, 2, 3, 5, 6, 7, 8]]
        torch.testing.assert_close(near, near[:1].expand(8))


def test_rotation_in_bf16_is_made_in_fp32() -> None:
    turns = rotation_2d((9, 250), 32)
    x = torch.randn(2, 2250, 32).bfloat16()
    out = rotate(x, turns)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, rotate(x.float(), turns).bfloat16(), rtol=0, atol=0)


def test_autocast_to_bf16_stays_near_fp32() -> None:
    model = reduced().eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        exact = model(x)[0]
        with torch.autocast('cpu', torch.bfloat16):
            rounded = model(x)[0]
    # The final norm makes outputs of size 1; bf16 keeps 8 bits, a few roundings add up.
    assert (rounded.float() - exact).abs().max() < 0.1


@pytest.mark.parametrize(('stages', 'trained'), [(-1, 3), (0, 3), (2, 1), (3, 0)])
def test_frozen_stages(stages: int, trained: int) -> None:
    model = reduced(frozen_stages=stages).train()
    free = [b for b in model.blocks if all(p.requires_grad for p in b.parameters())]
    assert len(free) == trained
    assert model.patch_embed.proj.weight.requires_grad is (stages < 0)
    assert model.norm.weight.requires_grad is (stages < 3)


def test_drop_path_and_decay_and_depth() -> None:
    model = reduced(drop_path_rate=0.4)
    assert [b.drop_path.drop_prob for b in model.blocks] == [0, 0.2, 0.4]
    assert model.get_layer_depth('backbone.blocks.1.mixer.w1', 'backbone.') == (2, 5)
    assert model.no_weight_decay() == set()
    assert model.pos_embed is None


@pytest.mark.parametrize('size', [(64, 96), (50, 70)])
def test_the_adapter_wraps_it(size: tuple[int, int]) -> None:
    backbone = dict(type='mmvttt.ViT3', arch=dict(REDUCED, num_layers=4), drop_path_rate=0.1)
    norm_cfg = dict(type='GN', num_groups=8)
    adapter = ViTAdapter(backbone, deform_num_heads=3, conv_inplane=16, norm_layer=norm_cfg)
    nn.init.constant_(adapter.interactions[0].injector.gamma, 0.1)
    outs = adapter(torch.randn(1, 3, *size))
    for stride, out in zip((4, 8, 16, 32), outs, strict=True):
        assert out.shape == (1, 48, math.ceil(size[0] / stride), math.ceil(size[1] / stride))
    sum(out.square().mean() for out in outs).backward()
    mixer = adapter.backbone.blocks[0].mixer
    assert all(p.grad.any() for p in mixer.parameters())


def test_registry() -> None:
    model = build_model(dict(type='mmvttt.ViT3', arch=REDUCED, out_type='avg_featmap'))
    assert isinstance(model, ViT3)


@pytest.mark.parametrize(
    ('kwargs', 'named'),
    [
        (dict(arch='huge'), ['huge', 'base', 'small', 'tiny']),
        (dict(arch=dict(embed_dims=64)), ['embed_dims', 'num_heads']),
        (dict(arch=dict(REDUCED, num_heads=5)), ['48', '5']),
        (dict(out_type='raw'), ['raw', 'featmap', 'avg_featmap']),
        (dict(drop_path_rate=-0.1), ['-0.1']),
        (dict(out_indices=3), ['3', '2']),
        (dict(frozen_stages=4), ['4', '3']),
    ],
)
def test_bad_options_are_named(kwargs: dict, named: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
        reduced(**kwargs)
    for text in named:
        assert text in str(error.value)
