"""H-ViT³ against the numbers of its paper and public code; sizes, norms, freezing, bad input."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmvttt.models.backbones import HViT3

DIMS = (16, 32, 48, 64)
REDUCED = dict(embed_dims=DIMS, depths=(1, 2, 1, 1), num_heads=(1, 2, 3, 4))
CLASSES = 1000
GN = dict(type='GN', num_groups=8)


def reduced(**kwargs) -> HViT3:
    torch.manual_seed(0)
    return HViT3(**{'arch': REDUCED, **kwargs})


@pytest.mark.parametrize(
    ('arch', 'params', 'flops', 'dense'),
    [
        ('tiny', 28.7036, 4.920, 28.19),
        ('small', 54.3621, 8.760, 53.85),
        ('base', 94.3693, 16.723, 93.73),
    ],
)
def test_sizes_of_tab_5(arch: str, params: float, flops: float, dense: float) -> None:
    with torch.device('meta'):
        model, backbone = HViT3(arch, out_type='avg_featmap').eval(), HViT3(arch)
        images = torch.empty(1, 3, 224, 224)
    head = model.embed_dims[-1] * CLASSES
    count = sum(p.numel() for p in model.parameters()) + head + CLASSES
    assert round(count / 1e6, 4) == params
    assert round(sum(p.numel() for p in backbone.parameters()) / 1e6, 2) == dense
    with FlopCounterMode(display=False) as counter:
        model(images)
    # The public count is 0.2 % to 0.3 % over our matrix products and convolutions.
    assert counter.get_total_flops() / 2e9 + head / 1e9 == pytest.approx(flops, rel=0.005)


@pytest.mark.parametrize('size', [(1, 1), (4, 31)])
def test_an_image_of_a_pixel_or_more(size: tuple[int, int]) -> None:
    outs = reduced().eval()(torch.randn(2, 3, *size))
    grids = [tuple(math.ceil(side / stride) for side in size) for stride in (4, 8, 16, 32)]
    assert [tuple(out.shape[2:]) for out in outs] == grids
    assert all(out.isfinite().all() for out in outs)


def test_no_buffer_knows_the_size_of_an_image() -> None:
    buffers = {n.rpartition('.')[2] for n, _ in reduced().named_buffers()}
    assert buffers == {'running_mean', 'running_var', 'num_batches_tracked', 'keep'}


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


@pytest.mark.parametrize('stages', [-1, 0, 2, 4])
@pytest.mark.parametrize('out_type', ['featmap', 'avg_featmap'])
def test_frozen_stages(stages: int, out_type: str) -> None:
    model = reduced(frozen_stages=stages, out_type=out_type).train()
    assert model.stem[0].bn.training is (stages < 0)
    assert model.stem[0].conv.weight.requires_grad is (stages < 0)
    for i, stage in enumerate(model.stages):
        assert all(p.requires_grad is (i >= stages) for p in stage.parameters())
        assert stage.training is (i >= stages)
    if out_type == 'avg_featmap':
        assert model.norm.weight.requires_grad is (stages < 4)
    else:
        free = [model.norms[str(i)].weight.requires_grad for i in range(4)]
        assert free == [i >= stages for i in range(4)]


def test_out_indices() -> None:
    model = reduced(out_indices=(1, -1)).eval()
    outs = model(torch.randn(1, 3, 64, 64))
    assert [out.shape[1] for out in outs] == [32, 64]
    assert set(model.norms) == {'1', '3'}


def test_drop_path_rises_over_all_blocks() -> None:
    model = reduced(drop_path_rate=0.4)
    rates = [b.drop_path.drop_prob for s in model.stages for b in s.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_layer_depth() -> None:
    model = reduced()
    depth = {
        'backbone.stem.0.conv.weight': 0,
        'backbone.stages.0.blocks.0.mixer.w1': 1,
        'backbone.stages.1.downsample.widen.weight': 2,
        'backbone.stages.1.blocks.1.cpe.bias': 3,
        'backbone.stages.3.blocks.0.norm1.weight': 5,
        'backbone.norms.0.weight': 6,
        'neck.conv.weight': 6,
    }
    for name, layer in depth.items():
        assert model.get_layer_depth(name, 'backbone.') == (layer, 7), name
    pooled = reduced(out_type='avg_featmap')
    assert pooled.get_layer_depth('norm.weight') == (6, 7)


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
