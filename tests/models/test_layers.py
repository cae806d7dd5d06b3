"""Convolutions, patches and positions against torch's and timm's own."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

from mmvttt.models.layers.conv import CausalConv1d, DWConv2d
from mmvttt.models.layers.embedding import PatchEmbed, resize_positions
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


@pytest.mark.parametrize('size', [(32, 48), (31, 50), (16, 16)])
def test_patches_are_a_convolution_of_the_padded_image(size: tuple[int, int]) -> None:
    embed = PatchEmbed(3, 8, 16).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, -size[1] % 16, 0, -size[0] % 16))
    leaves = list(embed.parameters())
    actual, expected = embed(x), torch.nn.functional.conv2d(padded, *leaves, stride=16)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    for one, other in zip(
        *(torch.autograd.grad(y, leaves, grad) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize('antialias', [False, True])
@pytest.mark.parametrize('new', [(4, 4), (7, 9), (3, 4), (1, 1)])
@pytest.mark.parametrize('prefix', [0, 2])
def test_positions_are_resized_as_by_timm(
    antialias: bool, new: tuple[int, int], prefix: int
) -> None:
    x = torch.randn(1, 12 + prefix, 5, requires_grad=True)
    with torch.autocast('cpu', torch.bfloat16):
        actual = resize_positions(x, new, (3, 4), prefix, antialias)
    expected = resample_abs_pos_embed(x, list(new), [3, 4], prefix, antialias=antialias)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad) for y in (actual, expected)))
