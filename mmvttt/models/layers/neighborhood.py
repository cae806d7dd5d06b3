"""Neighbourhood attention, the local branch of T⁵⁺ (t5 Eq. 15; Hassani et al., 2023)."""

from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .precision import at_least_fp32

# Numbers to gather at once: 256 MiB of fp32.
_GATHERED = 2**26


def neighborhood_attention(
    q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int], window: int
) -> Tensor:
    """softmax(q·kᵀ / √d)·v over the window around each query, shifted into the map at its borders.

    Every query attends to `window²` keys, none of which is padding, and a window larger than the
    map is cut to it. On a GPU the function calls torch's FlexAttention, compiled, because it would
    form all N² scores otherwise. FlexAttention has no backward on a CPU, where the neighbours are
    gathered for a chunk of queries at a time (memory N·window²·C with gradients).

    Args:
        q, k, v: `(B, h·w, H, d)`.
        hw: Size of the map.
        window: Side of the window, odd.

    Returns:
        `(B, h·w, H, d)`.
    """
    sides = (min(window, hw[0]), min(window, hw[1]))
    if not q.is_cuda:
        return _gathered(q, k, v, hw, sides)
    return _flex(q, k, v, _block_mask(hw, sides, str(q.device)), _compiled_flex())


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int], sides: tuple[int, int]
) -> Tensor:
    batch, _, heads, dim = q.shape
    rows, columns = (
        _start(torch.arange(n, device=q.device), n, side)[:, None]
        + torch.arange(side, device=q.device)
        for n, side in zip(hw, sides, strict=True)
    )
    # (h, w, kh, kw) → (N, window²): the index of every neighbour.
    index = (rows[:, None, :, None] * hw[1] + columns[None, :, None, :]).flatten(2).flatten(0, 1)
    q = q * dim**-0.5
    if torch.compiler.is_exporting():
        # The number of chunks would be fixed.
        return _weighed(q, k[:, index], v[:, index])
    chunk = max(1, _GATHERED // max(1, batch * index.shape[1] * heads * dim))
    parts = zip(index.split(chunk), q.split(chunk, 1), strict=True)
    return torch.cat([_weighed(query, k[:, near], v[:, near]) for near, query in parts], 1)


def _weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of `(B, n, H, d)` to the `(B, n, window², H, d)` neighbours of each."""
    weights = at_least_fp32(torch.einsum('bnhd,bnmhd->bnhm', q, k)).softmax(-1)
    return torch.einsum('bnhm,bnmhd->bnhd', weights.to(v.dtype), v)


def _inside(query: Tensor, key: Tensor, hw: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """Whether a key is in the window of a query, both given as indices of tokens."""
    row = key // hw[1] - _start(query // hw[1], hw[0], sides[0])
    column = key % hw[1] - _start(query % hw[1], hw[1], sides[1])
    return (row >= 0) & (row < sides[0]) & (column >= 0) & (column < sides[1])


def _start(query: Tensor, side: int, window: int) -> Tensor:
    """First row or column of a window in a map with `side` rows or columns."""
    return (query - window // 2).clamp(0, side - window)


@cache
def _compiled_flex():
    # Dynamic: otherwise each of detection's many image sizes would be compiled.
    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=64)
def _block_mask(hw: tuple[int, int], sides: tuple[int, int], device: str) -> BlockMask:
    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _inside(query, key, hw, sides)

    tokens = hw[0] * hw[1]
    # Cached, so not in inference mode: an inference tensor could not be used in a later training.
    with torch.inference_mode(False):
        return create_block_mask(inside, None, None, tokens, tokens, device=device)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, attention) -> Tensor:
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)
