"""ViT³ and H-ViT³: the mixer, rotary positions, sizes, norms."""

import math

import pytest
import torch
from torch import nn

from mmvttt.models.backbones import HViT3
from mmvttt.models.layers import ViT3Mixer
from mmvttt.models.layers.rope import rotate, rotation_2d

DIMS = (16, 32, 48, 64)
REDUCED = dict(embed_dims=DIMS, depths=(1, 2, 1, 1), num_heads=(1, 2, 3, 4))
CLASSES = 1000
GN = dict(type='GN', num_groups=8)


def reduced(**kwargs) -> HViT3:
    torch.manual_seed(0)
    return HViT3(**{'arch': REDUCED, **kwargs})


@pytest.mark.parametrize('size', [(1, 1), (4, 31)])
def test_an_image_of_a_pixel_or_more(size: tuple[int, int]) -> None:
    outs = reduced().eval()(torch.randn(2, 3, *size))
    grids = [tuple(math.ceil(side / stride) for side in size) for stride in (4, 8, 16, 32)]
    assert [tuple(out.shape[2:]) for out in outs] == grids
    assert all(out.isfinite().all() for out in outs)


def test_pooled_is_the_mean_of_the_batch_normed_tokens() -> None:
    model = reduced(out_type='avg_featmap').eval()
    nn.init.normal_(model.norm.running_mean)
    dense = reduced().eval()
    dense.load_state_dict(model.state_dict(), strict=False)
    x = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        (pooled,) = model(x)
        last = dense.stages[3](dense.stages[2](dense.stages[1](dense.stages[0](dense.stem(x)))))
    mean = (last.mean((2, 3)) - model.norm.running_mean) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(pooled, mean)


def test_positions_turn_with_rows_and_columns() -> None:
    """Without local convolutions only the rotary angles tell a map from its transpose."""
    model = reduced().double().eval()
    stage = model.stages[0]
    for block in stage.blocks:
        for conv in (block.cpe, block.mlp.dwconv):
            nn.init.zeros_(conv.weight)
        nn.init.zeros_(block.mixer.w3)
        nn.init.normal_(block.mixer.w1, std=0.3)
        nn.init.normal_(block.mixer.w2, std=0.3)
        nn.init.normal_(block.mixer.qkv.weight, std=0.3)
        with torch.no_grad():
            block.mixer.proj.weight.normal_(std=0.3)[:, -block.mixer.head_dims :] = 0
    x = torch.randn(1, 16, 6, 9, dtype=torch.float64)
    assert not torch.allclose(stage(x).mT, stage(x.mT), atol=1e-6)


@pytest.mark.parametrize('norm_cfg', [dict(type='SyncBN'), GN])
def test_norm_cfg_reaches_stem_and_downsampling(norm_cfg: dict) -> None:
    model = reduced(norm_layer=norm_cfg)
    kind = nn.SyncBatchNorm if norm_cfg['type'] == 'SyncBN' else nn.GroupNorm
    assert sum(isinstance(m, kind) for m in model.modules()) == 5 + 3
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    pooled = reduced(norm_layer=norm_cfg, out_type='avg_featmap').eval()
    assert isinstance(pooled.norm, kind)
    assert pooled(torch.randn(1, 3, 32, 32))[0].shape == (1, 64)


def test_out_indices() -> None:
    model = reduced(out_indices=(1, -1)).eval()
    outs = model(torch.randn(1, 3, 64, 64))
    assert [out.shape[1] for out in outs] == [32, 64]
    assert set(model.norms) == {'1', '3'}


def test_one_cell_trains_with_two_images_or_another_norm() -> None:
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match='more than 1 value per channel'):
        reduced(out_type='avg_featmap')(x)
    for model, images in ((reduced(), x.repeat(2, 1, 1, 1)), (reduced(norm_layer=GN), x)):
        outs = model(images)
        sum(out.square().sum() for out in outs).backward()
        assert all(out.isfinite().all() for out in outs)
        assert all(p.grad.isfinite().all() for p in model.parameters())
    assert reduced().eval()(x)[3].shape == (1, 64, 1, 1)


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
