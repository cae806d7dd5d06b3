"""Patches of an image as tokens, and position embeddings of any grid."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import without_autocast


class PatchConv2d(nn.Conv2d):
    """A convolution whose stride is its kernel, computed as one product of the patches.

    torch's convolutions of such strides are slower, their gradients above all.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in_channels, H, W)` of whole patches → `(B, C, h, w)`, channels last."""
        if torch.compiler.is_exporting():
            # An exporter cannot tell that free sizes are whole patches.
            return super().forward(x)
        height, width = self.kernel_size
        patches = x.unflatten(3, (-1, width)).unflatten(2, (-1, height)).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class PatchEmbed(nn.Module):
    """Projects every patch of an image to a token.

    Args:
        in_channels: Channels of the image.
        embed_dims: Channels C.
        patch_size: Side of a patch in pixels.
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int) -> None:
        super().__init__()
        self.proj = PatchConv2d(in_channels, embed_dims, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in_channels, H, W)`, padded to whole patches → `(B, C, ⌈H/patch⌉, ⌈W/patch⌉)`."""
        return self.proj(pad_to_multiple(x, self.proj.kernel_size[0]))


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pads `(…, H, W)` with zeros, at the right and the bottom, to multiples of a number."""
    # torch 2.15 cannot compile `-n % multiple` of a free size where an interpolation reads it.
    bottom, right = ((n + multiple - 1) // multiple * multiple - n for n in x.shape[-2:])
    # A condition would restrict an exported program to sizes that need padding, or that do not.
    needed = torch.compiler.is_exporting() or right or bottom
    return F.pad(x, (0, right, 0, bottom)) if needed else x


def resize_positions(
    embedding: Tensor,
    new: tuple[int, int],
    old: tuple[int, int],
    prefix: int = 0,
    antialias: bool = True,
) -> Tensor:
    """Resizes a position embedding `(1, prefix + h·w, C)` by bicubic interpolation to another grid.

    It is a product for each side, and so is the gradient: the gradient of torch's interpolation
    takes longer than a block. The `prefix` rows stay as they are. With `antialias` a smaller grid
    averages over its neighbourhood.
    """
    # A condition would restrict an exported program to sizes like its example's.
    if tuple(new) == tuple(old) and not torch.compiler.is_exporting():
        return embedding
    exact = torch.promote_types(embedding.dtype, torch.float32)
    rows, columns = (
        _bicubic(side, size, antialias, exact, embedding.device)
        for side, size in zip(old, new, strict=True)
    )
    with without_autocast(embedding):
        grid = embedding[0, prefix:].to(exact).unflatten(0, old)
        grid = columns @ (rows @ grid.flatten(1)).unflatten(1, grid.shape[1:])
    resized = grid.flatten(0, 1)[None].to(embedding.dtype)
    return torch.cat([embedding[:, :prefix], resized], 1) if prefix else resized


def _bicubic(
    old: int, new: int, antialias: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The matrix `(new, old)` of a bicubic interpolation of one side: the interpolated identity."""
    unit = torch.eye(old, dtype=dtype, device=device)[None, None]
    return F.interpolate(unit, (new, old), mode='bicubic', antialias=antialias)[0, 0]
