"""TTT-linear in plain PyTorch by explicit formulas, which the op runs without a kernel.

`forward` and `backward` compute `definition.dual` and its gradients with every image, head and
direction in the same batched products; only the dependence on the state is a Python loop.
`exported` is the forward pass in operators that exporters know.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from .._inputs import state_dtype
from .._op import Args, Grads
from .definition import Inputs, parts, scan_order

# Mini-batches of 16 tokens between two states saved for the backward pass.
SEGMENT = 32
# The padding of a chunk has no variance: with ε = 0 it would be NaN, and then all tokens.
LEAST_EPS = 1e-30
# Asks for LayerNorm's gradient with respect to its input only.
_INPUT_ONLY = [True, False, False]


def segment(mini_batch_size: int) -> int:
    """Mini-batches between two saved states.

    More tokens leave a GPU too few programs, more mini-batches do not fit in a CPU's cache.
    """
    return max(1, min(SEGMENT, 16 * SEGMENT // mini_batch_size))


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the saved Z, which overflows in fp16 for large tokens."""
    return torch.float32 if dtype == torch.float16 else dtype


class _Chunks:
    """Tokens `(B, T, R, H, …)` to chunks `(n, B·R·H, b, …)` in scan order, and back.

    The ragged tail is padded with zeros. With a step of zero the padding changes neither the state
    nor any output, and its gradients are zero, as with a shorter last mini-batch.
    """

    def __init__(self, q: Tensor, directions: str, mini_batch_size: int) -> None:
        self.batch, self.tokens, self.scans, self.heads, self.dim = q.shape
        self.directions = directions
        self.dtype, self.state = q.dtype, state_dtype(q.dtype)
        self.size = min(mini_batch_size, self.tokens)
        self.full, self.tail = divmod(self.tokens, self.size)
        self.count = self.full + bool(self.tail)
        self.programs = self.batch * self.scans * self.heads

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty((self.count, self.programs, *shape), dtype=self.state)

    def pack(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Chunks of `x` in the state's dtype; `out` may be a view `(n, B·R·H, b, …)`."""
        if out is None:
            out = self.empty(x, self.size, *x.shape[4:])
        if self.tail:
            out[-1].zero_()
        chunks = out.unflatten(1, (self.batch, self.scans, self.heads)).movedim((0, 4), (1, 2))
        for r, way in enumerate(self.directions):
            scan = x[:, :, r].flip(1) if way == 'b' else x[:, :, r]
            body, rest = scan.split([self.full * self.size, self.tail], dim=1)
            chunks[:, : self.full, :, r] = body.unflatten(1, (self.full, self.size))
            if self.tail:
                chunks[:, -1, : self.tail, r] = rest
        return out

    def pack_with_one(self, x: Tensor) -> Tensor:
        """`pack` with a column of ones at the end: the bias becomes one more row of the state."""
        out = self.empty(x, self.size, self.dim + 1)
        self.pack(x, out[..., : self.dim])
        out[..., self.dim] = 1
        return out

    def unpack(self, chunks: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `pack`, in a contiguous tensor of `dtype`."""
        shape = (self.batch, self.tokens, self.scans, self.heads, *chunks.shape[3:])
        out = chunks.new_empty(shape, dtype=dtype)
        chunks = chunks.unflatten(1, (self.batch, self.scans, self.heads)).movedim((0, 4), (1, 2))
        for r, way in enumerate(self.directions):
            scan = chunks[:, :, :, r].flatten(1, 2)[:, : self.tokens]
            out[:, :, r] = scan.flip(1) if way == 'b' else scan
        return out

    def state_of(self, w: Tensor, c: Tensor) -> Tensor:
        """Initial states `(B·R·H, d+1, d)`: [W; c] without the mean, which LayerNorm ignores."""
        state = torch.cat([w, c.unsqueeze(-2)], dim=-2)
        return self.parameter(state - state.mean(-1, keepdim=True))

    def parameter(self, x: Tensor) -> Tensor:
        """A parameter `(R, H, …)` copied to `(B·R·H, …)`, a row for every program."""
        return x.to(self.state).expand(self.batch, *x.shape).flatten(0, 2).contiguous()

    def reduce(self, x: Tensor) -> Tensor:
        """A parameter's gradient: the sum of `(…, B·R·H, d)` over all but scans, heads and d."""
        return x.sum(0).view(self.batch, self.scans, self.heads, *x.shape[2:]).sum(0)


def _normalize(z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(z − mean)/σ, mean and 1/σ of each row."""
    return torch.native_layer_norm(z, z.shape[-1:], None, None, eps)


def _project(u: Tensor, z: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Π(u) = (u − mean(u) − X·mean(uX))/σ, X = (z − mean)/σ: LayerNorm's input gradient."""
    return torch.ops.aten.native_layer_norm_backward(
        u, z, z.shape[-1:], mean, rstd, None, None, _INPUT_ONLY
    )[0]


@dataclass
class _Operands:
    """Parts of a scan that do not depend on its state, computed for all chunks at once."""

    chunks: _Chunks
    k: Tensor  # (n, N, b, d+1), N = B·R·H programs, last column 1
    q: Tensor  # (n, N, b, d+1), last column 1
    weight: Tensor  # γ (N, 1, d)
    target: Tensor  # λ − (V − K) (n, N, b, d): Y = γX + target
    tau: Tensor  # (N, b)
    tau_last: Tensor  # (N, 1)
    step: Tensor  # ℓ (n, N, b)
    scores: Tensor  # QKᵀ + 1 (n, N, b, b)
    e: Tensor  # E, lower triangle (n, N, b, b)
    m: Tensor  # M = E⊙(QKᵀ + 1) (n, N, b, b)
    decay: Tensor  # e⊙[K, 1] (n, N, b, d+1)


def _operands(inputs: Inputs, directions: str, mini_batch_size: int) -> _Operands:
    q, k, v, eta, w0, _, ln_weight, ln_bias, token_scale = inputs
    chunks = _Chunks(q, directions, mini_batch_size)
    keys, queries = chunks.pack_with_one(k), chunks.pack_with_one(q)
    step = chunks.pack(eta)
    tau = w0.new_ones(chunks.scans, mini_batch_size) if token_scale is None else token_scale
    tau = chunks.parameter(tau[:, None].expand(-1, chunks.heads, -1))
    tau, tau_last = tau[:, : chunks.size], tau[:, -1:]
    target = chunks.pack(v).neg_().add_(keys[..., :-1])
    target += chunks.parameter(ln_bias).unsqueeze(-2)
    scores = queries @ keys.mT
    e = (tau[..., None] * step[..., None, :]).tril_()
    return _Operands(
        chunks=chunks,
        k=keys,
        q=queries,
        weight=chunks.parameter(ln_weight).unsqueeze(-2),
        target=target,
        tau=tau,
        tau_last=tau_last,
        step=step,
        scores=scores,
        e=e,
        m=e * scores,
        decay=keys * (tau_last * step)[..., None],
    )


@torch.no_grad()
def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the scan chunk by chunk.

    Returns:
        O `(B, T, R, H, d)`, and with `keep`, for the backward pass (else empty tensors), without
        the mean over the outputs: Z = KW + c in the same shape, rounded to `kept_dtype` before it
        is used, and the state after every s = `segment` mini-batches and at the end: W `(B, R, H,
        ⌈n/s⌉, d, d)` and c `(B, R, H, ⌈n/s⌉, d)` of n mini-batches.
    """
    inputs, (directions, mini_batch_size, eps) = parts(args)
    q, ln_bias, eps = inputs.q, inputs.ln_bias, max(eps, LEAST_EPS)
    x = _operands(inputs, directions, mini_batch_size)
    chunks, dim, kept = x.chunks, q.shape[-1], kept_dtype(q.dtype)
    decay = x.decay.neg_()
    gain, offset = x.weight.square(), x.weight * x.target  # P = γ²X + γ·target
    state = chunks.state_of(inputs.w0, inputs.b0)
    zq = chunks.empty(q, chunks.size, dim)
    g, z = torch.empty_like(zq), torch.empty_like(zq) if keep else zq.new_empty(0)
    every = segment(mini_batch_size)
    kept_states = state.new_empty((-(-chunks.count // every) if keep else 0, *state.shape))
    for i in range(chunks.count):
        torch.bmm(x.q[i], state, out=zq[i])
        key_z = torch.bmm(x.k[i], state).to(kept).to(chunks.state)
        normed, mean, rstd = _normalize(key_z, eps)
        g[i] = _project(torch.addcmul(offset[i], gain, normed), key_z, mean, rstd)
        state.baddbmm_(decay[i].mT, g[i])
        if keep:
            z[i] = key_z
        if keep and ((i + 1) % every == 0 or i + 1 == chunks.count):
            kept_states[i // every] = state
    zq.flatten(0, 1).baddbmm_(x.m.flatten(0, 1), g.flatten(0, 1), alpha=-1)
    o = _normalize(zq, eps)[0].mul_(x.weight).add_(chunks.parameter(ln_bias).unsqueeze(-2))
    o += x.q[..., :dim]
    lead = (chunks.batch, chunks.scans, chunks.heads)
    states = kept_states.transpose(0, 1).unflatten(0, lead)
    return (
        chunks.unpack(o, chunks.dtype),
        chunks.unpack(z, kept) if keep else q.new_empty(0, dtype=kept),
        states[..., :dim, :].clone(memory_format=torch.contiguous_format),
        states[..., dim, :].clone(memory_format=torch.contiguous_format),
    )


@torch.no_grad()
def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """Gradients of `forward`'s O from the saved Z, from which the same states are recomputed.

    Returns:
        dq, dk, dv, deta, dw0, db0, dln_weight, dln_bias, dtoken_scale, contiguous, each in its
        input's shape and dtype; dtoken_scale is empty where `token_scale` is None.
    """
    inputs, (directions, mini_batch_size, eps) = parts(args)
    (do,), (z_kept, *_) = grads, kept
    q, _, _, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    x, eps = _operands(inputs, directions, mini_batch_size), max(eps, LEAST_EPS)
    chunks, dim, n = x.chunks, q.shape[-1], x.chunks.count
    z, do = chunks.pack(z_kept), chunks.pack(do)

    # Every LayerNorm of the keys, and G.
    key_normed, key_mean, key_rstd = _normalize(z, eps)
    y = x.target.addcmul_(x.weight, key_normed)
    g = _project(x.weight * y, z, key_mean, key_rstd)

    # Recompute Z̄ forward, from exactly the states of `forward`. States recomputed backward from
    # the last one carry the rounding error of the largest one, which LayerNorm amplifies without
    # bound if Z̄ is smaller still, as for tiny or zero queries.
    decay = x.decay.neg_()
    start = chunks.state_of(w0, b0)
    state = start.clone()
    zq = torch.empty_like(g)
    for i in range(n):
        torch.bmm(x.q[i], state, out=zq[i])
        state.baddbmm_(decay[i].mT, g[i])
    zq.flatten(0, 1).baddbmm_(x.m.flatten(0, 1), g.flatten(0, 1), alpha=-1)

    # The query side needs no gradient of the state.
    normed, mean, rstd = _normalize(zq, eps)
    dweight, dbias = (do * normed).sum(-2), do.sum(-2)
    d = _project(do * x.weight, zq, mean, rstd)
    s = (d @ g.mT).tril_()
    es = x.e * s
    de = (s * x.scores).neg_()
    dq = do.sub_(es @ x.k[..., :dim])
    dk = (es.mT @ x.q[..., :dim]).neg_()
    du = (x.m.mT @ d).neg_()

    # The key side before the gradient of the state is known.
    normed, mean, rstd = key_normed, key_mean, key_rstd
    gain = x.weight.square()
    # dZ = Π(dX) + dσ·X/d with Π taken term by term: it is linear, and Π(c·u) = c·Π(u) for a number
    # c per row, so Π(U·mean(PX)) = mean(PX)·dP and Π(P·mean(UX)) = mean(UX)·G.
    mixed = (x.weight * y * normed).mean(-1, keepdim=True).mul_(rstd)
    neg_last, neg_rstd = (x.tau_last * x.step)[..., None].neg_(), rstd.neg()
    decay_g = neg_last * g
    h, dp = torch.empty_like(g), torch.empty_like(g)

    # Backward with the gradient of the state.
    dstate = torch.zeros_like(start)
    for i in reversed(range(n)):
        torch.bmm(x.k[i], dstate, out=h[i])
        u = torch.addcmul(du[i], neg_last[i], h[i])
        dp[i] = _project(u, z[i], mean[i], rstd[i])
        dz = _project(dp[i] * gain, z[i], mean[i], rstd[i]).addcmul_(dp[i], mixed[i], value=-1)
        dz.addcmul_((u * normed[i]).mean(-1, keepdim=True).mul_(neg_rstd[i]), g[i])
        dz.addcmul_((u * g[i]).mean(-1, keepdim=True).mul_(neg_rstd[i]), normed[i])
        dk[i].baddbmm_(decay_g[i], dstate[:, :dim].mT)
        dstate.baddbmm_(x.k[i].mT, dz).baddbmm_(x.q[i].mT, d[i])
        z[i] = dz

    # Forward again, with the gradients of the keys and queries through Z and Z̄.
    state = start
    for i in range(n):
        dk[i].baddbmm_(z[i], state[:, :dim].mT)
        dq[i].baddbmm_(d[i], state[:, :dim].mT)
        state.baddbmm_(decay[i].mT, g[i])

    dy = dp * x.weight
    dk += dy
    dweight += dp.mul_(y).addcmul_(dy, normed).sum(-2)
    dbias += dy.sum(-2)
    dlast = (h * g).sum(-1).neg_()
    dstep = (x.tau[..., None] * de).sum(-2).addcmul_(x.tau_last, dlast)
    unpack, dtype = chunks.unpack, chunks.dtype
    dw0 = dstate.view(chunks.batch, chunks.scans, chunks.heads, dim + 1, dim).sum(0)
    if token_scale is None:
        dtoken_scale = w0.new_empty((chunks.scans, 0))
    else:
        dtoken_scale = w0.new_zeros(token_scale.shape, dtype=chunks.state)
        dtoken_scale[:, : chunks.size] = chunks.reduce((de * x.step[..., None, :]).sum(-1)).sum(1)
        dtoken_scale[:, -1] += chunks.reduce((dlast * x.step).sum(-1)).sum(1)
        dtoken_scale = dtoken_scale.to(token_scale.dtype)
    return (
        unpack(dq, dtype),
        unpack(dk, dtype),
        unpack(dy.neg_(), dtype),
        unpack(dstep, eta.dtype),
        torch.empty_like(w0, memory_format=torch.contiguous_format).copy_(dw0[..., :dim, :]),
        torch.empty_like(b0, memory_format=torch.contiguous_format).copy_(dw0[..., dim, :]),
        chunks.reduce(dweight).to(ln_weight.dtype),
        chunks.reduce(dbias).to(ln_bias.dtype),
        dtoken_scale,
    )


def exported(*args: Any) -> tuple[Tensor, ...]:
    """`dual` in operators that exporters know: torch's own `scan` in place of its loop.

    A runtime pays for each operator of each step, so operators that do not need the state are
    outside the loop, as in `forward`.
    """
    # The last two are the backend and whether to keep what the backward pass needs.
    *tensors, directions, size, eps = args[:12]
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = Inputs(*tensors)
    batch, tokens, scans, heads = q.shape[:4]
    count = (tokens + size - 1) // size

    # Tokens go to their mini-batches and back by index, one copy each: flips, padding and
    # transposes are applied to the indices. Nothing reads the padding, which comes after all
    # tokens.
    rows = torch.arange(batch * tokens * scans * heads, device=q.device).view(q.shape[:4])
    rows = F.pad(scan_order(rows, directions), (0, 0, 0, 0, 0, count * size - tokens))
    # (n, B, R, H, b); contiguous, because tokens take the strides of their index.
    rows = rows.unflatten(1, (count, size)).movedim((1, 2), (0, 4)).contiguous()
    back = torch.arange(rows.numel(), device=q.device).view(rows.shape)
    back = back.movedim((0, 4), (1, 2)).flatten(1, 2)[:, :tokens]
    back = scan_order(back, directions).contiguous()  # (B, T, R, H)

    def chunks(x: Tensor) -> Tensor:
        """`(B, T, R, H, …)` → `(n, B, R, H, b, …)`."""
        return x.to(state_dtype(x.dtype)).flatten(0, 3)[rows]

    q, k, v, eta = (chunks(x) for x in (q, k, v, eta))
    tau = w0.new_ones(scans, size) if token_scale is None else token_scale
    tau = tau[:, None, :, None]
    weight, bias = ln_weight.unsqueeze(-2), ln_bias.unsqueeze(-2)
    # The bias is one more row of the state.
    keys, queries = F.pad(k, (0, 1), value=1.0), F.pad(q, (0, 1), value=1.0)
    start = torch.cat([w0, b0.unsqueeze(-2)], -2)
    start = start - start.mean(-1, keepdim=True)
    start = start.expand(batch, -1, -1, -1, -1).clone()
    offset = weight * (bias - (v - k))
    decay = (tau[..., -1:, :] * eta.unsqueeze(-1) * keys).mT.contiguous()

    def step(*operands: Tensor) -> list[Tensor]:
        state, key, query, offset, decay, gain = operands
        z = (key @ state).to(kept).to(state.dtype)
        x, _, rstd = torch.native_layer_norm(z, x_shape, None, None, eps)
        p = gain * x + offset
        g = (p - p.mean(-1, keepdim=True) - x * (p * x).mean(-1, keepdim=True)) * rstd
        return [state - decay @ g, query @ state, g]

    x_shape, kept = q.shape[-1:], kept_dtype(args[0].dtype)
    _, zq, g = scan_op(step, [start], [keys, queries, offset, decay], [weight.square()])
    e = (tau * eta.unsqueeze(-2)).tril()
    zq = zq - (e * (queries @ keys.mT)) @ g
    out = q + weight * F.layer_norm(zq, x_shape, eps=eps) + bias
    nothing = args[0].new_empty(0)
    return out.flatten(0, 4)[back].to(args[0].dtype), nothing, nothing, nothing
