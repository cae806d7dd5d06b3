"""ViT³ against the numbers of its paper and public code; the contract of the plain backbones."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmvttt.models.backbones import ViT3
from mmvttt.models.layers import ViT3Mixer
from mmvttt.models.layers.rope import rotate, rotation_2d

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


def test_drop_path_and_decay_and_depth() -> None:
    model = reduced(drop_path_rate=0.4)
    assert [b.drop_path.drop_prob for b in model.blocks] == [0, 0.2, 0.4]
    assert model.get_layer_depth('backbone.blocks.1.mixer.w1', 'backbone.') == (2, 5)
    assert model.no_weight_decay() == set()
    assert model.pos_embed is None
