"""Implicit attention (t5 Eq. 13) and key shift (t5 Eq. 11) of token mixers, by layer.

A token's output depends on the value of another by a d×d matrix J_ij = ∂o_i/∂v_j. Its size here is
‖J‖_F/√d, which is the attention weight for softmax attention. The paper says "gradient magnitude"
without a definition. Computed by autograd for chosen queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.layers import InnerTraining
from .mixers import SOFTMAX, Mixing


def key_shift(k: Tensor) -> Tensor:
    """Returns ‖mean of the keys‖ / mean of ‖key‖ over N tokens (t5 Eq. 11): `(…, N, C)` → `(…)`.

    0 after an instance norm, 1/√N for independent keys of mean 0, so that only ratios at one N
    compare. The paper reports about 0.5 for a trained ViT at N = 196.
    """
    return k.mean(-2).norm(dim=-1) / k.norm(dim=-1).mean(-1)


def attention_distance(
    attention: Tensor, hw: tuple[int, int], queries: Sequence[int] | None = None
) -> Tensor:
    """Returns Σ_j |A_ij|·‖i − j‖ / Σ_j |A_ij|, the mean over queries, in patches.

    Args:
        attention: `(…, Q, N)`.
        hw: Size of the map, N = h·w.
        queries: Indices of the Q queries, or None for all N, in order.

    Returns:
        `(…)`.
    """
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in hw), indexing='ij')
    places = torch.stack([rows, columns], -1).flatten(0, 1).to(attention)
    chosen = places if queries is None else places[list(queries)]
    weights = attention.abs()
    distance = (weights * torch.cdist(chosen, places)).sum(-1) / weights.sum(-1)
    # The distance is undefined for a query that reads nothing (a learned rate of 0).
    return distance.nanmean(-1)


def implicit_attention(mixing: Mixing, queries: Sequence[int]) -> Tensor | None:
    """Implicit attention of chosen patches to all patches of the first image.

    For an `InnerTraining` through its `mix` (inner model, DWC(v), neighbourhood), for any other
    mixer through each op that it calls. The heads of several ops are concatenated, as are the heads
    of Vittt's directions, each with its own values.

    Args:
        mixing: A mixer on an image.
        queries: Indices of Q patches on the map, row by row.

    Returns: `(H, Q, h·w)`, or None where the values cannot be seen.
    """
    places = mixing.patches[list(queries)]
    if isinstance(mixing.mixer, SOFTMAX) and mixing.projected is not None:
        return softmax_weights(mixing)[0][:, places][..., mixing.patches]
    rows = [
        torch.stack([_row(read, v, int(query)) for query in places], 1)[..., mixing.patches]
        for read, v in _readers(mixing)
    ]
    return torch.cat(rows) if rows else None


def softmax_weights(mixing: Mixing) -> Tensor:
    """Attention `(B, H, T, T)` of one of timm's attentions."""
    heads = mixing.mixer.num_heads
    q, k, _ = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in mixing.projected)
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)


def _readers(mixing: Mixing) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Yields functions from values `(M, T, H, d)` to outputs of that shape, and the values."""
    mixer = mixing.mixer
    if not isinstance(mixer, InnerTraining):
        yield from (_op_reader(*call) for call in mixing.ops)
        return
    q, k, v = (y[:1] for y in mixing.projected)
    prefix = len(mixing.x[0]) - len(mixing.patches)

    def read(v: Tensor) -> Tensor:
        x, q1, k1 = (y[:1].expand(len(v), -1, -1) for y in (mixing.x, q, k))
        out = mixer.mix(x, q1, k1, v.flatten(2), mixing.hw, prefix)
        return out.unflatten(-1, mixer.heads)

    yield read, v.unflatten(-1, mixer.heads)


def _op_reader(name: str, args: Any, backend: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    op, v = getattr(torch.ops.ttt_kernels, name), args.v[:1]
    images = {n: getattr(args, n)[:1] for n in ('q', 'k', 'eta') if hasattr(args, n)}

    def read(values: Tensor) -> Tensor:
        count = len(values)
        of_each = {n: x.expand(count, *x.shape[1:]) for n, x in images.items()}
        of_each['v'] = values.reshape(count, *v.shape[1:])
        return op(*args._replace(**of_each), backend)[0].reshape(values.shape)

    return read, v.reshape(*v.shape[:2], -1, v.shape[-1])


def _row(read: Callable[[Tensor], Tensor], v: Tensor, query: int) -> Tensor:
    """‖J‖_F/√d of one query, `(H, T)`: d copies, one for each channel of o."""
    dim = v.shape[-1]
    with torch.enable_grad():
        values = v.detach().expand(dim, *v.shape[1:]).contiguous().requires_grad_()
        out = read(values)
        channel = torch.arange(dim, device=v.device)
        # Heads do not mix, so that one pass serves them all.
        (gradient,) = torch.autograd.grad(out[channel, query, :, channel].sum(), values)
    return (gradient.square().sum((0, -1)) / dim).sqrt().mT
