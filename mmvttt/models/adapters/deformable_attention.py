"""Deformable attention between grids of features (Deformable DETR, Sec. 4.1)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmvttt.arguments import check_backend, check_int, check_number
from mmvttt.errors import OptionError
from ttt_kernels import deform_attn


class Level(NamedTuple):
    """A grid over the image: pixels per cell, and its height and width in cells."""

    stride: int
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width


class SamplingGrid(NamedTuple):
    """Positions of Q query cells on L value levels.

    Attributes:
        centres: `(Q, L, 2)`: x and y of every query cell in fractions of the value level's extent.
        cells: `(L, 2)`: width and height of the value levels in cells.
        sizes: Height and width of the value levels in cells.
    """

    centres: Tensor
    cells: Tensor
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def between(
        cls,
        queries: Sequence[Level],
        values: Sequence[Level],
        dtype: torch.dtype,
        device: torch.device,
    ) -> 'SamplingGrid':
        """The cells of the levels `queries`, one level after the other, on the levels `values`.

        The grids of an image whose sides are not multiples of the largest stride reach over its
        border by different amounts. A centre is therefore computed in pixels and divided by each
        value level's extent (its stride times its cells), not by one common extent.
        """
        centres = []
        for stride, height, width in queries:
            y = (torch.arange(height, dtype=dtype, device=device) + 0.5) * stride
            x = (torch.arange(width, dtype=dtype, device=device) + 0.5) * stride
            y, x = torch.meshgrid(y, x, indexing='ij')
            centres.append(torch.stack((x, y), -1).flatten(0, 1))
        cells = torch.tensor([[v.width, v.height] for v in values], dtype=dtype, device=device)
        strides = torch.tensor([[v.stride] for v in values], dtype=dtype, device=device)
        centres = torch.cat(centres)[:, None] / (strides * cells)
        return cls(centres, cells, tuple(v.size for v in values))


class DeformableAttention(nn.Module):
    """Multi-head attention to a few sampled positions instead of every token.

    Each query predicts, for each head and value level, `num_points` offsets from its own position
    and their weights. The values there are sampled bilinearly and summed.

    Args:
        embed_dims: Channels of queries and values, C.
        num_heads: Heads H.
        num_levels: Value levels L.
        num_points: Sampled positions per head and level, P.
        ratio: Channels of the sampled values as a fraction of C.
        backend: Implementation of the op: 'triton', 'numba' or 'reference'. None leaves the choice
            to it (docs/kernels.md).
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        num_levels: int,
        num_points: int = 4,
        ratio: float = 1.0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_int('num_heads', num_heads)
        check_number('deform_ratio', ratio, above=0)
        check_int('num_points', num_points)
        check_backend('deform_backend', backend)
        value_dims = round(embed_dims * ratio)
        if value_dims < 1 or value_dims % num_heads:
            raise OptionError(
                f'deformable attention has {value_dims} value channels (embed_dims {embed_dims} × '
                f'deform_ratio {ratio}), which {num_heads} heads cannot share evenly: choose '
                'a deform_ratio so that they divide'
            )
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        self.backend = backend
        samples = num_heads * num_levels * num_points
        self.sampling_offsets = nn.Linear(embed_dims, 2 * samples)
        self.attention_weights = nn.Linear(embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, value_dims)
        self.output_proj = nn.Linear(value_dims, embed_dims)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises a fixed pattern: head h looks in direction h of a ring, point p at p + 1
        cells.

        All samples weigh the same. Content moves the pattern once the two zeroed maps have learned.
        """
        angles = torch.arange(self.num_heads) * (2 * math.pi / self.num_heads)
        ring = torch.stack((angles.cos(), angles.sin()), -1)
        # Onto the border of a square, so that diagonal heads look at diagonal neighbours.
        ring = ring / ring.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1)
        offsets = ring[:, None, None, :] * steps[:, None]
        offsets = offsets.expand(-1, self.num_levels, -1, -1)
        self.sampling_offsets.bias.copy_(offsets.flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, query: Tensor, value: Tensor, grid: SamplingGrid) -> Tensor:
        """Attends from `query` `(B, Q, C)` to `value` `(B, S, C)` and returns `(B, Q, C)`.

        S runs over the cells of the value levels of `grid`, one level after the other.
        """
        batch, num_queries, _ = query.shape
        shape = (batch, num_queries, self.num_heads, self.num_levels, self.num_points)
        value = self.value_proj(value).unflatten(-1, (self.num_heads, -1))
        # In fp32 under autocast: in bf16, neighbouring cells of a wide map would fall together.
        offsets = self.sampling_offsets(query).view(*shape, 2).to(grid.cells.dtype)
        locations = grid.centres[:, None, :, None] + offsets / grid.cells[:, None]
        weights = self.attention_weights(query).unflatten(-1, (self.num_heads, -1))
        weights = weights.softmax(-1, dtype=grid.cells.dtype)
        sampled = deform_attn(
            value, grid.sizes, locations, weights.view(shape), backend=self.backend
        )
        return self.output_proj(sampled)
