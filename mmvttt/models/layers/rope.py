"""Rotary positions of a token map: half the channels rotate with the row, half with the column."""

import math

import torch
from torch import Tensor

from mmvttt.errors import OptionError

from .precision import at_least_fp32


def rotation_2d(
    hw: tuple[int, int],
    channels: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rotations of every token of an `(h, w)` map, `(h·w, channels / 2)` unit complex numbers.

    The first channels/4 rotate by the row index times a frequency, the others by the column index.
    Frequency j of channels/4 is `10000 ** (−4j / channels)`. The map may have any size.

    Args:
        hw: Size of the map.
        channels: Channels C, a multiple of 4.
        device: Device of the angles.
        dtype: Precision of the angles, fp32 or fp64.
    """
    if channels % 4:
        raise OptionError(
            f'Rotary positions of a map turn pairs of channels, half of them by the row: '
            f'{channels} channels do not divide by 4.'
        )
    height, width = hw
    options = dict(device=device, dtype=dtype)
    frequencies = 10000.0 ** -torch.arange(0, 1, 4 / channels, **options)
    # Rows and columns share sines of positions instead of sines of every token. Their number does
    # not depend on which side is longer, because an export with free sizes cannot compare them.
    angles = torch.arange(height + width, **options)[:, None] * frequencies
    places = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    turns = torch.cat(
        [
            places[:height, None].expand(-1, width, -1, -1),
            places[None, :width].expand(height, -1, -1, -1),
        ],
        dim=-2,
    )
    return torch.view_as_complex(turns.flatten(0, 1))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates pairs of neighbouring channels of `(B, N, …, C)` by `(N, C / 2)`, in fp32 or more.

    Returns:
        A contiguous tensor of the shape and dtype of `x`.
    """
    exact = at_least_fp32(x).unflatten(-1, (-1, 2))
    rotation = rotation.unflatten(0, (-1, *[1] * (x.dim() - 3)))
    if torch.compiler.is_compiling():
        turned = _rotate_real(exact.flatten(-2), torch.view_as_real(rotation))
    else:
        turned = torch.view_as_real(torch.view_as_complex(exact.contiguous()) * rotation)
        turned = turned.flatten(-2)
    return turned.to(x.dtype)


def _rotate_real(x: Tensor, rotation: Tensor) -> Tensor:
    """`rotate` in real numbers: compilers and exporters do not fuse complex ones."""
    real, imaginary = rotation.unbind(-1)
    along = torch.stack([real, real], -1).flatten(-2)
    across = torch.stack([-imaginary, imaginary], -1).flatten(-2)
    if torch.compiler.is_exporting():
        # OpenVINO swaps pairs one by one, but multiplies by a permutation fast.
        size = math.gcd(x.shape[-1], 32)
        swap = torch.eye(size, dtype=x.dtype, device=x.device).unflatten(0, (-1, 2)).flip(1)
        swapped = (x.unflatten(-1, (-1, size)) @ swap.flatten(0, 1)).flatten(-2)
    else:
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * along + swapped * across
