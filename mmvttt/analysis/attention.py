"""What T⁵'s mixers attend to: key shift (t5 Eq. 11) and implicit attention (t5 Eq. 13), by layer.

A token's output depends on the value of another by a d×d matrix J_ij = ∂o_i/∂v_j. Two numbers of it
are the attention weight itself where a mixer is softmax attention: its trace over d, which has a
sign, and its Frobenius norm over √d. One step on the dot loss is linear in V, as are DWC(v) and
neighbourhood attention, so both have closed forms, and no autograd is needed. The paper says
"gradient magnitude", and not which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.layers import DWConv2d, TTTMixer
from ..models.layers.attention import LinearAttention, SoftmaxAttention
from ..models.layers.inner_models import MLP, GatedFC, SwiGLU
from ..models.layers.neighborhood import neighborhood_weights

# Numbers of (query, key, hidden) that are formed at once: 128 MiB of fp32.
_AT_ONCE = 2**25


class ImplicitAttention(NamedTuple):
    """∂o_i/∂v_j of the heads of a layer, `(B, H, N, N)` each: query i, key j.

    Attributes:
        trace: trace(J) / d.
        norm: ‖J‖_F / √d.
    """

    trace: Tensor
    norm: Tensor


@dataclass(frozen=True)
class LayerAttention:
    """A mixer on some images.

    Attributes:
        name: The mixer's name in the model.
        hw: Size of the map, N = h·w.
        key_shift: Of the projected keys of each image `(B,)`, before any norm.
        attention: Of the mixer, or None where it has no closed form.
    """

    name: str
    hw: tuple[int, int]
    key_shift: Tensor
    attention: ImplicitAttention | None


def key_shift(k: Tensor) -> Tensor:
    """‖mean of the keys‖ / mean of ‖key‖ over N tokens (t5 Eq. 11): keys `(…, N, C)` → `(…)`.

    0 after an instance norm; 1/√N for independent keys of mean 0, so that only ratios at one N
    compare. The paper prints about 0.5 for a trained ViT at N = 196.
    """
    return k.mean(-2).norm(dim=-1) / k.norm(dim=-1).mean(-1)


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
    slope: Tensor | float = 0.0
    factors: tuple[tuple[Tensor, Tensor], ...] = ()
    left: Tensor | None = None
    right: Tensor | None = None

    def traces_of_inner(self) -> Tensor | float:
        """trace(Lᵀ diag(m) R)."""
        if not self.factors:
            return 0.0
        # What a hidden channel adds to the trace.
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


def implicit_attention(mixer: TTTMixer, x: Tensor, hw: tuple[int, int]) -> ImplicitAttention:
    """The implicit attention of a mixer, without its projections of v and output.

    Of all that reads the values: the inner model, DWC(v) and neighbourhood attention.

    Args:
        mixer: With `SoftmaxAttention`, `LinearAttention`, or one full-batch step of 1.0 on the dot
            loss of `SwiGLU`, `GatedFC` or `MLP` of two layers without residual, undamped; its keys
            without position embedding.
        x: The mixer's input `(B, N, C)`, normed tokens.
        hw: Size of the map.

    Raises:
        ValueError: For another mixer.
    """
    if not has_closed_form(mixer):
        raise ValueError(
            f'{type(mixer.inner).__name__} with loss={mixer.loss!r}, damping={mixer.damping}, '
            f'key_position={mixer.key_grid} has no closed form here: choose SwiGLU, GatedFC, MLP '
            'of two layers (one step on the dot loss, undamped) or an attention, and leave '
            'key_position out.'
        )
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        q, k, v = mixer.qkv(x).chunk(3, dim=-1)
        near = None
        if mixer.neighborhood is not None:
            projected = (y.unflatten(-1, mixer.heads) for y in (q, k))
            near = neighborhood_weights(*projected, hw, mixer.neighborhood)
        q, k = mixer.shape_keys(q, k, hw)
        q, k, v = (y.unflatten(-1, mixer.heads) for y in (q, k, v))
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


def has_closed_form(mixer: TTTMixer) -> bool:
    """Whether `implicit_attention` knows the mixer."""
    inner = mixer.inner
    if mixer.key_grid is not None:
        return False
    if isinstance(inner, SoftmaxAttention | LinearAttention):
        return True
    plain = mixer.fused and mixer.loss == 'dot' and not mixer.damping
    return plain and isinstance(inner, SwiGLU | GatedFC | MLP)


def _of_step(mixer: TTTMixer, q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int]) -> _Jacobian:
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
    """Of each tap: the P queries and keys that it joins, and its weights `(H, 1, d)`."""
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


def attention_distance(attention: Tensor, hw: tuple[int, int]) -> Tensor:
    """Σ_j |A_ij|·‖i − j‖ / Σ_j |A_ij|, the mean over queries: `(…, N, N)` → `(…)`, in patches."""
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in hw), indexing='ij')
    places = torch.stack([rows, columns], -1).flatten(0, 1).to(attention)
    apart = torch.cdist(places, places)
    weights = attention.abs()
    return ((weights * apart).sum(-1) / weights.sum(-1)).mean(-1)


def inspect_layers(model: nn.Module, images: Tensor) -> list[LayerAttention]:
    """Every `TTTMixer` of a model on images `(B, 3, H, W)`, in evaluation mode.

    Raises:
        ValueError: The model has none.
    """
    mixers = {name: m for name, m in model.named_modules() if isinstance(m, TTTMixer)}
    if not mixers:
        raise ValueError(
            f'{type(model).__name__} has no TTTMixer to look at: give a T⁵, or a ViT³ with one.'
        )
    seen: dict[str, tuple[Tensor, tuple[int, int]]] = {}
    handles = [
        mixer.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[:2]}))
        for name, mixer in mixers.items()
    ]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    found = []
    for name, (x, hw) in seen.items():
        mixer = mixers[name]
        with torch.no_grad():
            shift = key_shift(mixer.qkv(x).chunk(3, dim=-1)[1])
        attention = implicit_attention(mixer, x, hw) if has_closed_form(mixer) else None
        found.append(LayerAttention(name, hw, shift, attention))
    return found
