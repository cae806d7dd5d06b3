"""Convolutions, patches and positions against torch's and timm's own; stochastic depth."""

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from mmvttt.models.layers.drop_path import DropPath
from mmvttt.models.layers.embedding import PatchEmbed, resize_positions
from mmvttt.models.layers.neighborhood import _block_mask


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


def test_images_of_free_sizes_are_compiled() -> None:
    embed, positions = PatchEmbed(3, 8, 16), torch.randn(1, 9, 8)

    def tokens(x: torch.Tensor) -> torch.Tensor:
        maps = embed(x)
        return maps.flatten(2).mT + resize_positions(positions, maps.shape[2:], (3, 3), 0, False)

    compiled = torch.compile(tokens, backend='aot_eager', dynamic=True)
    for height in (33, 50):
        x = torch.randn(2, 3, height, 40)
        torch.testing.assert_close(compiled(x), tokens(x))


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


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_whole_samples_are_dropped_and_the_mean_stays(dtype):
    torch.manual_seed(0)
    x = torch.ones(4096, 3, 2, dtype=dtype, requires_grad=True)
    drop = DropPath(0.25)
    y = drop(x)
    assert y.dtype == dtype
    assert (y == y[:, :1, :1]).all()
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75, dtype=dtype).item()}
    assert y.float().mean().item() == pytest.approx(1, abs=0.05)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_the_rate_survives_a_start_without_memory() -> None:
    """A model is built on the meta device, gets memory or weights that are assigned."""
    with torch.device('meta'):
        given, assigned = (torch.nn.Sequential(DropPath(0.75)) for _ in range(2))
    given.to_empty(device='cpu').half()
    assigned.load_state_dict({}, assign=True)
    for drop in (given, assigned):
        assert not drop.state_dict()
        assert set(drop(torch.ones(4096, 1)).unique().tolist()) == {0.0, 4.0}
