"""Implicit attention (t5 Eq. 13) and key shift (t5 Eq. 11) of token mixers, by layer.

A token's output depends on the value of another by a d×d matrix J_ij = ∂o_i/∂v_j. Two numbers of it
are the attention weight itself where a mixer is softmax attention: its trace over d, which has a
sign, and its Frobenius norm over √d. The paper says "gradient magnitude", and not which.

One undamped step on the dot loss is linear in V, as are DWC(v) and neighbourhood attention: closed
forms for all pairs of tokens. Everything else (Vittt, ViT³, other losses and inner models) goes by
autograd, for chosen queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from timm.layers import Attention as TimmAttention
from torch import Tensor, nn

from ..models.layers import DWConv2d, InnerTraining
from ..models.layers.attention import LinearAttention, SoftmaxAttention
from ..models.layers.inner_losses import dot
from ..models.layers.inner_models import MLP, GatedFC, SwiGLU
from ..models.layers.neighborhood import neighborhood_weights
from .mixers import Mixing

# Numbers of (query, key, hidden) that are formed at once: 128 MiB of fp32.
_AT_ONCE = 2**25


class ImplicitAttention(NamedTuple):
    """∂o_i/∂v_j of the heads of a layer, `(B, H, Q, N)` each: query i, key j.

    Attributes:
        trace: trace(J) / d.
        norm: ‖J‖_F / √d.
    """

    trace: Tensor
    norm: Tensor


def key_shift(k: Tensor) -> Tensor:
    """Returns ‖mean of the keys‖ / mean of ‖key‖ over N tokens (t5 Eq. 11): `(…, N, C)` → `(…)`.

    0 after an instance norm; 1/√N for independent keys of mean 0, so that only ratios at one N
    compare. The paper prints about 0.5 for a trained ViT at N = 196.
    """
    return k.mean(-2).norm(dim=-1) / k.norm(dim=-1).mean(-1)


def attention_distance(
    attention: Tensor, hw: tuple[int, int], queries: Sequence[int] | None = None
) -> Tensor:
    """Returns Σ_j |A_ij|·‖i − j‖ / Σ_j |A_ij|, the mean over queries, in patches.

    Args:
        attention: `(…, Q, N)`.
        hw: Size of the map, N = h·w.
        queries: Places of the Q queries; None for all N, in order.

    Returns:
        `(…)`.
    """
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in hw), indexing='ij')
    places = torch.stack([rows, columns], -1).flatten(0, 1).to(attention)
    chosen = places if queries is None else places[list(queries)]
    weights = attention.abs()
    distance = (weights * torch.cdist(chosen, places)).sum(-1) / weights.sum(-1)
    # A query that reads nothing (a learned rate of 0) has no distance.
    return distance.nanmean(-1)


def attention_rows(mixing: Mixing, queries: Sequence[int]) -> ImplicitAttention | None:
    """Implicit attention of chosen patches, by autograd, to all patches of the first image.

    For an `InnerTraining` through its `mix` (inner model, DWC(v), neighbourhood), for any other
    mixer through each op that it calls. The heads of several ops stand side by side, as do the
    heads of Vittt's directions, each with the values of its own.

    Args:
        mixing: A mixer on an image.
        queries: Places of Q patches on the map, row by row.

    Returns:
        `(1, H, Q, h·w)`; None where the values cannot be seen.
    """
    places = mixing.patches[list(queries)]
    found = []
    for read, v in _readers(mixing):
        rows = [_row(read, v, int(place)) for place in places]
        trace, norm = (torch.stack(x, 1)[..., mixing.patches] for x in zip(*rows, strict=True))
        found.append((trace, norm))
    if not found:
        return None
    return ImplicitAttention(*(torch.cat(x)[None] for x in zip(*found, strict=True)))


def _readers(mixing: Mixing) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Yields functions from values `(M, T, H, d)` to outputs of that shape, and the values."""
    mixer = mixing.mixer
    if isinstance(mixer, InnerTraining):
        q, k, v = (y[:1] for y in mixing.projected)
        prefix = len(mixing.x[0]) - len(mixing.patches)

        def read(v: Tensor) -> Tensor:
            x, q1, k1 = (y[:1].expand(len(v), -1, -1) for y in (mixing.x, q, k))
            out = mixer.mix(x, q1, k1, v.flatten(2), mixing.hw, prefix)
            return out.unflatten(-1, mixer.heads)

        yield read, v.unflatten(-1, mixer.heads)
    elif isinstance(mixer, TimmAttention) and mixing.projected is not None:
        weights = softmax_weights(mixing)[:1]
        v = mixing.projected[2][:1].unflatten(-1, (mixer.num_heads, -1))
        yield (lambda v: torch.einsum('bhij,mjhd->mihd', weights, v)), v
    for name, args in mixing.ops if not isinstance(mixer, InnerTraining) else ():
        yield _op_reader(name, args)


def _op_reader(name: str, args: tuple) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    op = getattr(torch.ops.ttt_kernels, name)
    scan = name == 'ttt_linear'
    q, k, v, *eta = (x[:1] for x in (args[:4] if scan else args[:3]))
    # Without the last argument of the scan, by which inference keeps no states.
    shared = args[4:13] if scan else args[3:]

    def read(values: Tensor) -> Tensor:
        copies = (x.expand(len(values), *x.shape[1:]) for x in (q, k, *eta))
        q_, k_, *eta_ = copies
        out = op(q_, k_, values.reshape(len(values), *v.shape[1:]), *eta_, *shared)[0]
        return out.reshape(values.shape)

    return read, v.reshape(*v.shape[:2], -1, v.shape[-1])


def _row(read: Callable, v: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """trace(J)/d and ‖J‖_F/√d of one query, `(H, T)` each: d copies, one for each channel of o."""
    dim = v.shape[-1]
    with torch.enable_grad():
        values = v.detach().expand(dim, *v.shape[1:]).contiguous().requires_grad_()
        out = read(values)
        channel = torch.arange(dim, device=v.device)
        # Heads do not mix, so that one pass serves them all.
        (gradient,) = torch.autograd.grad(out[channel, place, :, channel].sum(), values)
    trace = gradient[channel, :, :, channel].sum(0) / dim
    return trace.mT, (gradient.square().sum((0, -1)) / dim).sqrt().mT


def softmax_weights(mixing: Mixing) -> Tensor:
    """Attention `(B, H, T, T)` of a timm `Attention`, with its norms of q and k."""
    mixer = mixing.mixer
    q, k, _ = (y.unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2) for y in mixing.projected)
    with torch.no_grad():
        return ((mixer.q_norm(q) * mixer.scale) @ mixer.k_norm(k).mT).softmax(-1)


# ---------------------------------------------------------------------------------- closed forms


class _Jacobian(NamedTuple):
    """J_ij = e_ij I + β_ij Lᵀ diag(m_ij) R, m_ij a sum of products of factors of i and j.

    Attributes:
        identity: e, `(B, H, N, N)`.
        slope: β, of the same shape.
        factors: Those of queries and of keys, `(B, H, N, d)` each; none for an attention.
        left: L, `(B, H, d, d)`.
        right: R, `(B, H, d, d)`.
    """

    identity: Tensor
    slope: Tensor = torch.tensor(0.0)
    factors: tuple[tuple[Tensor, Tensor], ...] = ()
    left: Tensor | None = None
    right: Tensor | None = None

    def traces_of_inner(self) -> Tensor | float:
        """trace(Lᵀ diag(m) R)."""
        if not self.factors:
            return 0.0
        # The part of a hidden channel in the trace.
        g = (self.left * self.right).sum(-1)
        return sum((a * g.unsqueeze(2)) @ c.mT for a, c in self.factors)

    def diagonal(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The diagonals of J for P pairs of tokens, `(B, H, P, d)`, or `(B, H, P, 1)` if even."""
        found = self.identity[:, :, queries, keys, None]
        if not self.factors:
            return found
        m = sum(a[:, :, queries] * c[:, :, keys] for a, c in self.factors)
        return found + self.slope[:, :, queries, keys, None] * (m @ (self.left * self.right))

    def squares_of_inner(self) -> Tensor | float:
        """‖Lᵀ diag(m) R‖_F²."""
        if not self.factors:
            return 0.0
        both = (self.left @ self.left.mT) * (self.right @ self.right.mT)
        squares = torch.empty_like(self.slope)
        count = self.factors[0][1].numel()
        chunk = max(1, _AT_ONCE // max(1, count))
        for at in range(0, squares.shape[2], chunk):
            rows = slice(at, at + chunk)
            m = sum(a[:, :, rows, None] * c[:, :, None] for a, c in self.factors)
            squares[:, :, rows] = (m @ both.unsqueeze(2) * m).sum(-1)
        return squares


def implicit_attention(mixing: Mixing) -> ImplicitAttention:
    """Implicit attention between all patches `(B, H, N, N)`, in closed form.

    Of everything that reads the values: the inner model, DWC(v) and neighbourhood attention.

    Args:
        mixing: See `has_closed_form`.

    Raises:
        ValueError: For another mixer.
    """
    mixer, hw = mixing.mixer, mixing.hw
    if not has_closed_form(mixing):
        raise ValueError(
            f'{mixing.name} has no closed form: take attention_rows, or choose SwiGLU, GatedFC, '
            'MLP of two layers (one step on the dot loss, undamped) or an attention'
        )
    if isinstance(mixer, TimmAttention):
        weights = softmax_weights(mixing)[:, :, mixing.patches][..., mixing.patches]
        return ImplicitAttention(weights, weights)
    with torch.no_grad(), torch.autocast(mixing.x.device.type, enabled=False):
        near = None
        q, k, v = (y.unflatten(-1, mixer.heads) for y in mixing.projected)
        if mixer.neighborhood is not None:
            near = neighborhood_weights(q, k, hw, mixer.neighborhood)
        q, k = (y.unflatten(-1, mixer.heads) for y in mixing.shaped)
        if isinstance(mixer.inner, SoftmaxAttention):
            scores = torch.einsum('bihd,bjhd->bhij', q, k) * q.shape[-1] ** -0.5
            jacobian = _Jacobian(scores.softmax(-1))
        elif isinstance(mixer.inner, LinearAttention):
            left, right = mixer.inner.features(q, k)
            weights = left @ right.mT
            jacobian = _Jacobian(weights / weights.sum(-1, keepdim=True))
        else:
            jacobian = _of_step(mixer, q, k, v, hw)
        if near is not None:
            jacobian = jacobian._replace(identity=jacobian.identity + near)
        dim = q.shape[-1]
        e, slope, inner = jacobian.identity, jacobian.slope, jacobian.traces_of_inner()
        trace = dim * e + slope * inner
        squares = dim * e**2 + 2 * e * slope * inner + slope**2 * jacobian.squares_of_inner()
        if mixer.v_conv is not None:
            for queries, keys, taps in _taps(mixer.v_conv, mixer.heads, hw):
                diagonal = jacobian.diagonal(queries, keys)
                trace[:, :, queries, keys] += taps.sum(-1)
                squares[:, :, queries, keys] += ((2 * diagonal + taps) * taps).sum(-1)
        parts = 1 if near is None else 2
        norm = (squares.clamp_min(0) / dim).sqrt()
        return ImplicitAttention(trace / (dim * parts), norm / parts)


def has_closed_form(mixing: Mixing) -> bool:
    """Whether `implicit_attention` knows the mixer.

    It knows `SoftmaxAttention`, `LinearAttention`, timm's attention, and one full-batch step of 1.0
    on the dot loss of `SwiGLU`, `GatedFC` or `MLP` of two layers without residual, undamped, with
    no tokens in front of the map.
    """
    mixer = mixing.mixer
    if isinstance(mixer, TimmAttention):
        return mixing.projected is not None
    if not isinstance(mixer, InnerTraining) or mixer.key_grid is not None:
        return False
    if mixing.x.shape[1] != len(mixing.patches):
        return False
    if isinstance(mixer.inner, SoftmaxAttention | LinearAttention):
        return True
    plain = mixer.fused and mixer.inner_loss is dot and not mixer.damping
    return plain and isinstance(mixer.inner, SwiGLU | GatedFC | MLP)


def _of_step(
    mixer: InnerTraining, q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int]
) -> _Jacobian:
    """J = κ (α I + β Lᵀ diag(m) R) with β = q·k, α and m products of the hidden layers of both."""
    start = {name: w.to(q.dtype) for name, w in mixer.inner.named_parameters()}
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    eta = torch.ones_like(k[..., 0])
    each = {name: w.expand(len(k), *w.shape) for name, w in start.items()}
    stepped = mixer.train_inner(each, k, v, eta, hw)
    hidden_q, factors_q = _hidden(mixer.inner, stepped, q)
    hidden_k, factors_k = _hidden(mixer.inner, start, k)
    beta = q @ k.mT
    if isinstance(mixer.inner, GatedFC):
        dim = q.shape[-1]
        left = right = torch.eye(dim, dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
        alpha = torch.zeros_like(beta)
    else:
        last = 'w3' if isinstance(mixer.inner, SwiGLU) else 'w2'
        left, right = start[last].expand_as(stepped[last]), stepped[last]
        alpha = hidden_q @ hidden_k.mT
    kappa = mixer.scale / k.shape[2]
    factors = tuple(zip(factors_q, factors_k, strict=True))
    return _Jacobian(kappa * alpha, kappa * beta, factors, left, right)


def _taps(
    conv: DWConv2d, heads: tuple[int, int], hw: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields for each tap the P queries and keys that it joins and its weights `(H, 1, d)`."""
    places = torch.arange(hw[0] * hw[1], device=conv.weight.device).view(hw)
    for row, column in product(*map(range, conv.kernel_size)):
        down, right = row - conv.padding[0], column - conv.padding[1]
        rows = slice(max(-down, 0), hw[0] - max(down, 0))
        columns = slice(max(-right, 0), hw[1] - max(right, 0))
        queries = places[rows, columns].flatten()
        weights = conv.weight[:, 0, row, column].unflatten(0, heads).unsqueeze(1)
        yield queries, queries + down * hw[1] + right, weights


def _hidden(inner: nn.Module, w: dict, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A token's hidden layer, and its factors of m, `(B, H, N, d)` each.

    m_ij is the sum of the products of the factors of query i and key j.
    """

    def silu(z: Tensor) -> tuple[Tensor, Tensor]:
        s = z.sigmoid()
        return z * s, s * (1 + z * (1 - s))

    if isinstance(inner, MLP):
        value, slope = silu(x @ w['w1'])
        return value, [slope]
    gate, up = ('w2', 'w1') if isinstance(inner, GatedFC) else ('w1', 'w2')
    value, slope = silu(x @ w[gate])
    up = x @ w[up]
    return value * up, [up * slope, value]
