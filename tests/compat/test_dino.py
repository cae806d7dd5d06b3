"""DINO's weights of the original mmdet in the fork's wider decoder: the same function."""

import pytest
import torch
from mmdet.models.layers.transformer.dino_layers import DinoTransformerDecoder
from mmdet.models.layers.transformer.utils import coordinate_to_encoding
from mmengine.runner import load_state_dict

from mmvttt import distributions
from mmvttt.openmmlab.compat.dino import widened

FORK = distributions.providers('mmdet') == ['onedl-mmdetection']
WEIGHT = 'ref_point_head.layers.0.weight'


def test_a_widened_weight_does_the_same() -> None:
    torch.manual_seed(0)
    boxes, weight = torch.rand(2, 5, 4), torch.randn(7, 4 * 128)
    expected = coordinate_to_encoding(boxes, num_feats=128) @ weight.T
    wide = coordinate_to_encoding(boxes, num_feats=256) @ widened(weight).T
    # Angles up to 2π at frequencies that are powers in fp32.
    torch.testing.assert_close(wide, expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not FORK, reason='the original has nothing to widen')
@pytest.mark.parametrize('load', [torch.nn.Module.load_state_dict, load_state_dict])
def test_the_fork_loads_the_original_s(load) -> None:
    attention = dict(embed_dims=32, num_heads=2)
    layer = dict(
        self_attn_cfg=attention,
        cross_attn_cfg=dict(embed_dims=32, num_levels=1),
        ffn_cfg=dict(embed_dims=32, feedforward_channels=8),
    )
    decoder = DinoTransformerDecoder(
        num_layers=1, layer_cfg=layer, post_norm_cfg=None, return_intermediate=True
    )
    state = decoder.state_dict()
    assert state[WEIGHT].shape == (32, 128)
    narrow = torch.randn(32, 64)
    load(decoder, {**state, WEIGHT: narrow})
    assert torch.equal(decoder.state_dict()[WEIGHT], widened(narrow))
    own = torch.randn(32, 128)
    load(decoder, {**state, WEIGHT: own})
    assert torch.equal(decoder.state_dict()[WEIGHT], own)
