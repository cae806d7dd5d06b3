"""Inputs and calls of deform_attn for its tests, and what it is by definition."""

import torch

from ttt_kernels import deform_attn

NAMES = ('value', 'sampling_locations', 'attention_weights')
PYRAMID = ((5, 7), (1, 1), (3, 1), (1, 4))


def make(
    shapes=PYRAMID, queries=9, batch=2, heads=3, dim=5, points=4, dtype=torch.float64, inside=False
):
    """Inputs by name; a third of the points lies outside the image, some far away.

    inside: Of their cells, so that fp32 does not round points to the other side of a border.
    """
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    pixels, levels = sum(h * w for h, w in shapes), len(shapes)
    locations = 1.5 * rand(batch, queries, heads, levels, points, 2) - 0.25
    locations[:, :1] *= 40
    if inside:
        sizes = torch.tensor(shapes).flip(-1)[:, None]
        locations = ((locations * sizes).floor() + 0.125) / sizes
    values = (
        2 * rand(batch, pixels, heads, dim) - 1,
        locations,
        rand(batch, queries, heads, levels, points)
        .flatten(-2)
        .softmax(-1)
        .unflatten(-1, (levels, -1)),
    )
    return {n: x.to(dtype) for n, x in zip(NAMES, values, strict=True)}


def call(inputs, shapes=PYRAMID, **kwargs):
    value, locations, weights = inputs.values()
    return deform_attn(value, shapes, locations, weights, **kwargs)


def definition(inputs, shapes=PYRAMID):
    """Every pixel weighs in with a tent one pixel wide: bilinear, and zero outside by itself."""
    value, locations, weights = inputs.values()
    output = 0
    for level, pixels in enumerate(value.split([h * w for h, w in shapes], dim=1)):
        tents = []
        for axis, size in ((1, shapes[level][0]), (0, shapes[level][1])):
            centres = (torch.arange(size, dtype=value.dtype) + 0.5) / size
            distance = (locations[:, :, :, level, :, axis, None] - centres).abs() * size
            tents.append((1 - distance).clamp(min=0))
        tent = (tents[0].unsqueeze(-1) * tents[1].unsqueeze(-2)).flatten(-2)
        output = output + torch.einsum(
            'bqhp,bqhps,bshd->bqhd', weights[:, :, :, level], tent, pixels
        )
    return output.flatten(2)
