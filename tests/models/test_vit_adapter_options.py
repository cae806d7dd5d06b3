"""mmvttt.ViTAdapter: starting values, freezing, learning rates, options and their errors."""

import pytest
import torch
from torch import nn

from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.adapters.deformable_attention import DeformableAttention
from mmvttt.models.backbones import Vittt

from .adapters import PlainStub, build, build_vittt, image, loss_of


def test_deformable_attention_starts_as_a_ring():
    attention = DeformableAttention(32, num_heads=4, num_levels=3, num_points=2)
    offsets = attention.sampling_offsets(torch.randn(5, 32)).view(5, 4, 3, 2, 2)
    east, south, west, north = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]
    ring = torch.tensor([east, south, west, north])
    for point in range(2):
        expected = ((point + 1) * ring)[:, None].expand(5, 4, 3, 2)
        torch.testing.assert_close(offsets[..., point, :], expected, rtol=0, atol=1e-6)
    assert not attention.attention_weights(torch.randn(5, 32)).any()


def test_freeze_backbone():
    model = build(freeze_backbone=True).train()
    assert not model.backbone.training
    assert model.spatial_prior.training
    loss_of(model(image())).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is name.startswith('backbone.'), name


def test_layer_depth():
    model = build()
    depth = {name: model.get_layer_depth(name) for name, _ in model.named_parameters()}
    assert depth['backbone.proj.weight'] == (0, 6)
    assert depth['backbone.blocks.2.weight'] == (3, 6)
    others = {d for name, d in depth.items() if not name.startswith('backbone.')}
    assert others == {(5, 6)}
    assert model.get_layer_depth('backbone.backbone.blocks.0.bias', 'backbone.') == (1, 6)
    assert model.get_layer_depth('backbone.level_embed', 'backbone.') == (5, 6)


def test_layer_depth_of_vittt():
    model = build_vittt()
    for name, _ in model.named_parameters():
        depth, total = model.get_layer_depth(f'backbone.{name}', 'backbone.')
        assert total == 6
        if name.startswith('backbone.blocks.'):
            assert depth == int(name.split('.')[2]) + 1
        else:
            assert depth == (0 if name.startswith('backbone.') else 5)
    assert {'level_embed', 'backbone.pos_embed'} <= model.no_weight_decay()
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()}


# Errors ----------------------------------------------------------------------------------------


def test_no_plain_backbone():
    with pytest.raises(TypeError, match=r'cannot wrap Linear.*embed_dims.*run_block.*mmvttt.Vittt'):
        ViTAdapter(nn.Linear(3, 3))


def test_other_patch_size():
    backbone = PlainStub()
    backbone.patch_size = 14
    with pytest.raises(ValueError, match=r'patch_size 16.*PlainStub has 14'):
        ViTAdapter(backbone)


def test_any_depth_and_uneven_groups():
    assert build(num_layers=6).interaction_indexes == [(0, 0), (1, 2), (3, 3), (4, 5)]
    model = build(num_layers=2)
    assert model.interaction_indexes == [(0, 0), (1, 1)]
    assert len(model(image())) == 4


def test_options_without_effect_are_said(caplog) -> None:
    arch = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=48)
    ViTAdapter(dict(type='ViT3', arch=arch, out_indices=(0, 3)), norm_layer='BN')
    (record,) = [r for r in caplog.records if r.levelname == 'WARNING']
    assert 'backbone.out_indices=(0, 3) has no effect in a ViTAdapter' in record.getMessage()


@pytest.mark.parametrize('freeze', [False, True])
def test_the_module_that_it_is_given_stays_as_it_was(freeze: bool) -> None:
    backbone = Vittt('tiny', img_size=64).eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        before = backbone(image)[-1]
        model = ViTAdapter(backbone, norm_layer='BN', freeze_backbone=freeze).eval()
        model(image)
        assert torch.equal(backbone(image)[-1], before)
    assert all(p.requires_grad for p in backbone.parameters())
    inside = model.backbone.state_dict()
    assert all(torch.equal(inside[n], v) for n, v in backbone.state_dict().items() if n in inside)
