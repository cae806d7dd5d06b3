"""H-ViT³: norms, precision; for its formulas see tests/checkpoints/test_authors.py."""

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import nn

from mmvttt.models.layers.norms import build_norm
from mmvttt.models.layers.rope import rotate, rotation_2d

from .building import build_case

GN = dict(type='GN', num_groups=8)


@pytest.mark.parametrize(
    ('norm_layer', 'kind'), [('SyncBN', nn.SyncBatchNorm), (GN, nn.GroupNorm), ('LN', LayerNorm2d)]
)
def test_norms_of_stem_downsampling_and_feature(norm_layer: str | dict, kind: type) -> None:
    model = build_case('HViT3', norm_layer=norm_layer, out_type='avg_featmap').eval()
    assert sum(isinstance(m, kind) for m in model.modules()) == 5 + 3 + 1
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert model(torch.randn(1, 3, 32, 48))[0].shape == (1, 64)


def test_a_layer_norm_is_over_the_channels_of_a_map() -> None:
    x = torch.randn(2, 8, 5, 8)
    expected = nn.functional.layer_norm(x.movedim(1, 3), (8,)).movedim(3, 1)
    torch.testing.assert_close(build_norm(dict(type='LN', eps=1e-5), 8)(x), expected)


def test_one_cell_trains_with_two_images_or_another_norm() -> None:
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match='more than 1 value per channel'):
        build_case('HViT3', out_type='avg_featmap')(x)
    for options, images in (({}, x.repeat(2, 1, 1, 1)), (dict(norm_layer=GN), x)):
        model = build_case('HViT3', **options)
        outs = model(images)
        sum(out.square().sum() for out in outs).backward()
        assert all(out.isfinite().all() for out in outs)
        assert all(p.grad.isfinite().all() for p in model.parameters())
    assert build_case('HViT3').eval()(x)[3].shape == (1, 64, 1, 1)


def test_rotation_in_bf16_is_made_in_fp32() -> None:
    turns = rotation_2d((9, 250), 32)
    x = torch.randn(2, 2250, 32).bfloat16()
    out = rotate(x, turns)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, rotate(x.float(), turns).bfloat16(), rtol=0, atol=0)
