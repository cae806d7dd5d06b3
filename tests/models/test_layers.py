"""Convolutions over tokens against torch's own, written out per direction."""

import pytest
import torch
import torch.nn.functional as F

from mmvttt.models.layers import CausalConv1d, DWConv2d
from mmvttt.models.layers.neighborhood import _block_mask


@pytest.mark.parametrize('tokens', [1, 3, 17])
@pytest.mark.parametrize(
    'directions', [('forward',), ('backward',), ('forward', 'backward'), ('backward', 'forward')]
)
def test_causal_conv_is_a_conv1d_in_each_direction(tokens: int, directions: tuple) -> None:
    torch.manual_seed(0)
    conv = CausalConv1d(6, 4, directions).double()
    x = torch.randn(2, tokens, len(directions), 6, dtype=torch.float64)
    y = conv(x)
    for r, direction in enumerate(directions):
        scan = x[:, :, r].flip(1) if direction == 'backward' else x[:, :, r]
        expected = F.conv1d(
            F.pad(scan.transpose(1, 2), (3, 0)), conv.weight[r, :, None], groups=6
        ).transpose(1, 2)
        if direction == 'backward':
            expected = expected.flip(1)
        torch.testing.assert_close(y[:, :, r], expected)


def test_depthwise_conv_on_a_map() -> None:
    torch.manual_seed(0)
    conv = DWConv2d(5).double()
    x = torch.randn(2, 12, 5, dtype=torch.float64)
    image = x.transpose(1, 2).reshape(2, 5, 3, 4)
    expected = F.conv2d(image, conv.weight, padding=1, groups=5).flatten(2).transpose(1, 2)
    torch.testing.assert_close(conv(x, (3, 4)), expected)


def test_a_mask_made_in_inference_mode_serves_a_later_training() -> None:
    """It is kept for the size of the map; FlexAttention reads its tensors in both passes."""
    _block_mask.cache_clear()
    with torch.inference_mode():
        mask = _block_mask((5, 7), (3, 3), 'cpu')
    assert not mask.kv_indices.is_inference()
    assert not mask.kv_num_blocks.is_inference()
    assert _block_mask((5, 7), (3, 3), 'cpu') is mask
    assert _block_mask((7, 5), (3, 3), 'cpu') is not mask
