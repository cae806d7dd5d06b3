"""Triton kernels of T⁵'s inner models: two passes over the tokens forward, two backward.

Forward: `_step` sums the inner gradients G over k and v, `_read` reads q with the stepped weights.
Backward: `_read_backward` goes over q and dO and sums dW′, the gradients of the updated weights;
`_step_backward` goes over k and v with j, dW′ scaled by `_launch.relative`: a mean gradient may be
too small for half precision, and everything after it is linear in it. If few (image, head) pairs
would leave a GPU idle, several programs share a sum (`_launch`).

Everything between the loads and the stores of tokens is feature-major, `(D, BLOCK)`: a weight is
then the first operand of a product, and the matrix computed from the tokens the second. WGMMA takes
the second from shared memory only, where a token's gradient and a sum over the tokens share one
copy. Sums of the output weight are kept transposed for the same reason. Weights have the tokens'
type, because an operand that is used as loaded may stay in shared memory too.

Weights and their gradients are stacked, `(2|3, D, D)`, the output weight last. In the two-layer
model (not GATED) w2 is not read, and z2 and u2 are 1. With the dot loss e is v, and its sign is in
the factors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._op import Args, Grads
from .._triton import (
    MMA_SYNC,
    add_dot,
    again,
    dense_start,
    dot,
    load_tokens,
    share_of,
    silu,
    square,
    start,
    store_tokens,
)

_NAME = 'ttt_mlp'
# RELOAD: weights that are reloaded inside loops, see `_step_backward`.
NEVER, ONCE, EVERY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# ------------------------------------------------------------------------------------------- tiles


@triton.jit
def _weights(base, program, D: tl.constexpr, GATED: tl.constexpr):
    """Pointers `(D, D)` to W1, W2 and the output weight of a head. Without GATED W2's are W1's."""
    base += program.to(tl.int64) * ((3 if GATED else 2) * D * D) + square(D, D)
    return base, base + (D * D if GATED else 0), base + (2 * D * D if GATED else D * D)


@triton.jit
def _store_sums(base, w1, w2, w_out, D: tl.constexpr, GATED: tl.constexpr):
    """Sums of a program, `w_out` transposed."""
    base += tl.program_id(0).to(tl.int64) * ((3 if GATED else 2) * D * D)
    tl.store(base + square(D, D), w1)
    if GATED:
        tl.store(base + D * D + square(D, D), w2)
    tl.store(base + (2 if GATED else 1) * D * D + tl.trans(square(D, D)), w_out)


@triton.jit
def _error(v_tile, hidden, w_out, L2: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """e `(D, BLOCK)`: v, or for the L2 loss V̂ − v. `hidden` is in the type of the tokens."""
    e = tl.trans(v_tile)
    if L2:
        e = (dot(tl.trans(w_out), hidden, ACC, PRECISION) - e.to(ACC)).to(v_tile.dtype)
    return e


@triton.jit
def _zeros(D: tl.constexpr, L2: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of `_add_output`."""
    return tl.zeros((2, D // 2, D) if L2 and PRECISION == 'ieee' else (D, D), ACC)


@triton.jit
def _add_output(total, e, p, L2: tl.constexpr, PRECISION: tl.constexpr):
    """total + e·pᵀ, the tokens' contribution to the output weight, transposed.

    With the L2 loss both factors are computed, and WGMMA would take the first from registers.
    Batched products of half the rows use mma.sync instead, as fp32 products do anyway. So
    `_step_backward` may add two of them to one loop-carried sum: Triton 3.6 to 3.8 miscompile only
    two tcgen05 there (Triton 10821).
    """
    if L2 and PRECISION == 'ieee':
        D: tl.constexpr = p.shape[0]
        BLOCK: tl.constexpr = p.shape[1]
        e = tl.reshape(e, (2, D // 2, BLOCK))
        rows = tl.broadcast_to(tl.trans(p)[None], (2, BLOCK, D))
        total = add_dot(total, e, rows, PRECISION)
    else:
        total = add_dot(total, e, tl.trans(p), PRECISION)
    return total


# ----------------------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits', 'divisor'])
def _step(
    k,  # (B, N, H, D), any strides but the last
    v,
    weights,  # (H, 2|3, D, D), as all weights from here on in the type of the tokens
    g,  # (B, H, splits, 2|3, D, D)
    k_strides,
    v_strides,
    factor,
    N,
    H,
    span,
    splits,
    divisor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    L2: tl.constexpr,
    RELOAD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums G·N/s of a span of tokens, times factor/divisor."""
    ACC: tl.constexpr = g.dtype.element_ty
    TYPE: tl.constexpr = k.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    k += start(program, H, k_strides)
    v += start(program, H, v_strides)
    at_w1, at_w2, at_w_out = _weights(weights, program % H, D, GATED)
    w1, w2, w_out = tl.load(at_w1), tl.load(at_w2), tl.load(at_w_out)
    g1 = tl.zeros((D, D), ACC)
    g2 = tl.zeros((D, D), ACC)
    g_out = _zeros(D, L2, ACC, PRECISION)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        k_tile = load_tokens(k, n, last, k_strides[1], D, BLOCK)
        v_tile = load_tokens(v, n, last, v_strides[1], D, BLOCK)
        k_columns = tl.trans(k_tile)
        a, slope, _ = silu(
            dot(tl.trans(again(w1, at_w1, RELOAD == EVERY)), k_columns, ACC, PRECISION)
        )
        p = a
        if GATED:
            z2 = dot(tl.trans(again(w2, at_w2, RELOAD == EVERY)), k_columns, ACC, PRECISION)
            p = a * z2
            slope = slope * z2
        p = p.to(TYPE)
        e = _error(v_tile, p, again(w_out, at_w_out, RELOAD == EVERY), L2, ACC, PRECISION)
        d = dot(again(w_out, at_w_out, RELOAD == EVERY), e, ACC, PRECISION)
        f1 = (d * slope).to(TYPE)
        g1 = add_dot(g1, k_columns, tl.trans(f1), PRECISION)
        if GATED:
            f2 = (d * a).to(TYPE)
            g2 = add_dot(g2, k_columns, tl.trans(f2), PRECISION)
        g_out = _add_output(g_out, e, p, L2, PRECISION)
    # In the interpreter `tl.cast` would round it to fp32 first.
    factor = tl.full((), factor, ACC) / divisor
    _store_sums(g, g1 * factor, g2 * factor, tl.reshape(g_out, (D, D)) * factor, D, GATED)


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits'])
def _read(
    q,  # (B, N, H, D), any strides but the last
    stepped,  # (B, H, 2|3, D, D): W′
    o,  # (B, N, H, D)
    q_strides,
    N,
    H,
    span,
    splits,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    RELOAD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """O = (silu(QW1′)⊙QW2′)·W_o′ of a span of tokens."""
    TYPE: tl.constexpr = q.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    program, first, last = share_of(splits, span, N)
    q += start(program, H, q_strides)
    o += dense_start(program, N, H, D)
    at_w1, at_w2, at_w_out = _weights(stepped, program, D, GATED)
    w1, w2, w_out = tl.load(at_w1), tl.load(at_w2), tl.load(at_w_out)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        q_columns = tl.trans(load_tokens(q, n, last, q_strides[1], D, BLOCK))
        p, _, _ = silu(dot(tl.trans(again(w1, at_w1, RELOAD == EVERY)), q_columns, ACC, PRECISION))
        if GATED:
            p *= dot(tl.trans(again(w2, at_w2, RELOAD == EVERY)), q_columns, ACC, PRECISION)
        out = dot(tl.trans(again(w_out, at_w_out, RELOAD == EVERY)), p.to(TYPE), ACC, PRECISION)
        store_tokens(o, n, last, H * D, tl.trans(out), D, BLOCK)


# ---------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits'])
def _read_backward(
    do,  # (B, N, H, D), any strides but the last
    q,
    stepped,  # (B, H, 2|3, D, D): W′
    dq,  # (B, N, H, D)
    dw,  # (B, H, splits, 2|3, D, D)
    do_strides,
    q_strides,
    N,
    H,
    span,
    splits,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    RELOAD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ, and dW′ of a span of tokens."""
    ACC: tl.constexpr = dw.dtype.element_ty
    TYPE: tl.constexpr = q.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    do += start(program, H, do_strides)
    q += start(program, H, q_strides)
    dq += dense_start(program, N, H, D)
    at_w1, at_w2, at_w_out = _weights(stepped, program, D, GATED)
    w1, w2, w_out = tl.load(at_w1), tl.load(at_w2), tl.load(at_w_out)
    dw1 = tl.zeros((D, D), ACC)
    dw2 = tl.zeros((D, D), ACC)
    dw_out = tl.zeros((D, D), ACC)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        q_columns = tl.trans(load_tokens(q, n, last, q_strides[1], D, BLOCK))
        do_columns = tl.trans(load_tokens(do, n, last, do_strides[1], D, BLOCK))
        h, slope, _ = silu(
            dot(tl.trans(again(w1, at_w1, RELOAD == EVERY)), q_columns, ACC, PRECISION)
        )
        dp = dot(again(w_out, at_w_out, RELOAD == EVERY), do_columns, ACC, PRECISION)
        p = h
        if GATED:
            u2 = dot(tl.trans(again(w2, at_w2, RELOAD == EVERY)), q_columns, ACC, PRECISION)
            p = h * u2
            slope = slope * u2
        du1 = (dp * slope).to(TYPE)
        out = dot(again(w1, at_w1, RELOAD == EVERY), du1, ACC, PRECISION)
        dw1 = add_dot(dw1, q_columns, tl.trans(du1), PRECISION)
        if GATED:
            du2 = (dp * h).to(TYPE)
            out = add_dot(out, again(w2, at_w2, RELOAD == EVERY), du2, PRECISION)
            dw2 = add_dot(dw2, q_columns, tl.trans(du2), PRECISION)
        store_tokens(dq, n, last, H * D, tl.trans(out), D, BLOCK)
        dw_out = add_dot(dw_out, do_columns, tl.trans(p.to(TYPE)), PRECISION)
    _store_sums(dw, dw1, dw2, dw_out, D, GATED)


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits'])
def _step_backward(
    k,  # (B, N, H, D), any strides but the last
    v,
    weights,  # (H, 2|3, D, D)
    j,  # (B, H, 2|3, D, D): dW′ over all tokens, over `peak`
    peak,  # (B, H)
    dk,  # (B, N, H, D)
    dv,
    dw,  # (B, H, splits, 2|3, D, D)
    k_strides,
    v_strides,
    factor,
    N,
    H,
    span,
    splits,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    L2: tl.constexpr,
    RELOAD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK, dV and the step's part of dW for a span of tokens, all linear in j.

    RELOAD loads weights again from the cache: Triton keeps both orientations of all six matrices in
    shared memory, 96 KB at D = 64, which leaves little on some GPUs. ONCE: W2 for every block.
    EVERY: all of them for every product, as the other kernels do then.
    """
    ACC: tl.constexpr = dw.dtype.element_ty
    TYPE: tl.constexpr = k.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    k += start(program, H, k_strides)
    v += start(program, H, v_strides)
    out_start = dense_start(program, N, H, D)
    dk += out_start
    dv += out_start
    at_w1, at_w2, at_w_out = _weights(weights, program % H, D, GATED)
    w1, w2, w_out = tl.load(at_w1), tl.load(at_w2), tl.load(at_w_out)
    at_j1, at_j2, at_j_out = _weights(j, program, D, GATED)
    j1, j2, j_out = tl.load(at_j1), tl.load(at_j2), tl.load(at_j_out)
    # For the L2 loss j and v in e have the opposite sign.
    sign = -1.0 if L2 else 1.0
    scale = tl.load(peak + program) * factor / N
    sum1 = tl.zeros((D, D), ACC)
    sum2 = tl.zeros((D, D), ACC)
    sum_out = _zeros(D, L2, ACC, PRECISION)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        k_tile = load_tokens(k, n, last, k_strides[1], D, BLOCK)
        v_tile = load_tokens(v, n, last, v_strides[1], D, BLOCK)
        k_columns = tl.trans(k_tile)
        # Factors of d and dp in dz1 and dz2, to keep few values in registers.
        a, slope, bend = silu(
            dot(tl.trans(again(w1, at_w1, RELOAD == EVERY)), k_columns, ACC, PRECISION)
        )
        r1 = dot(tl.trans(again(j1, at_j1, RELOAD == EVERY)), k_columns, ACC, PRECISION)
        dd = r1 * slope
        bend *= r1
        p = a
        if GATED:
            z2 = dot(tl.trans(again(w2, at_w2, RELOAD == EVERY)), k_columns, ACC, PRECISION)
            r2 = dot(tl.trans(again(j2, at_j2, RELOAD == EVERY)), k_columns, ACC, PRECISION)
            tilt = dd
            p = a * z2
            dd = dd * z2 + r2 * a
            bend = bend * z2 + r2 * slope
            slope *= z2
        p = p.to(TYPE)
        dd = dd.to(TYPE)
        e = _error(v_tile, p, again(w_out, at_w_out, RELOAD == EVERY), L2, ACC, PRECISION)
        sum_out = _add_output(sum_out, e, dd, L2, PRECISION)
        de = dot(tl.trans(again(j_out, at_j_out, RELOAD == EVERY)), p, ACC, PRECISION)
        de = add_dot(de, tl.trans(again(w_out, at_w_out, RELOAD == EVERY)), dd, PRECISION)
        store_tokens(dv, n, last, H * D, tl.trans(de * (scale * sign)), D, BLOCK)
        dp = dot(again(j_out, at_j_out, RELOAD == EVERY), e, ACC, PRECISION)
        if L2:
            de = de.to(TYPE)
            dp = add_dot(dp, again(w_out, at_w_out, RELOAD == EVERY), de, PRECISION)
            sum_out = _add_output(sum_out, de, p, L2, PRECISION)
        d = dot(again(w_out, at_w_out, RELOAD == EVERY), e, ACC, PRECISION)
        dz1 = (d * bend + dp * slope).to(TYPE)
        sum1 = add_dot(sum1, k_columns, tl.trans(dz1), PRECISION)
        out = dot(again(w1, at_w1, RELOAD == EVERY), dz1, ACC, PRECISION)
        out = add_dot(out, again(j1, at_j1, RELOAD == EVERY), (d * slope).to(TYPE), PRECISION)
        if GATED:
            dz2 = (d * tilt + dp * a).to(TYPE)
            sum2 = add_dot(sum2, k_columns, tl.trans(dz2), PRECISION)
            out = add_dot(out, again(w2, at_w2, RELOAD != NEVER), dz2, PRECISION)
            out = add_dot(out, again(j2, at_j2, RELOAD == EVERY), (d * a).to(TYPE), PRECISION)
        store_tokens(dk, n, last, H * D, tl.trans(out * scale), D, BLOCK)
    _store_sums(dw, sum1 * scale, sum2 * scale, tl.reshape(sum_out, (D, D)) * scale, D, GATED)


# -------------------------------------------------------------------------------------------- host


# Tokens a block, warps and stages, chosen by registers and spills. Four warps are one WGMMA
# of 64 features; two groups of four would both compute all of it. By default the assembler of
# Triton 3.6 uses 32 registers for `step` of SwiGLU on sm_80, and spills the rest.
_BLOCK_32 = {'BLOCK': 32, 'num_warps': 4, 'STAGES': 2, 'RELOAD': NEVER}
_BLOCK_64 = {**_BLOCK_32, 'BLOCK': 64}
_CONFIGS = {
    'step': {**_BLOCK_64, 'most_registers': 255},
    'read': _BLOCK_64,
    'read_backward': _BLOCK_32,
    'step_backward': _BLOCK_32,
}
# Without WGMMA, and for the L2 loss in `_add_output`, operands are in registers: 64 tokens spill.
_STEP_32 = {'step': _BLOCK_32}
# For GPUs with less than 104 KB of shared memory for a program.
_LITTLE = {'step_backward': {'BLOCK': 16, 'num_warps': 4, 'STAGES': 1, 'RELOAD': ONCE}}
# In fp32 a product is three, and an operand two; at d = 64 eight warps share them.
_SINGLE = {'BLOCK': 32, 'num_warps': 4, 'STAGES': 1, 'RELOAD': NEVER, 'most_registers': 255}
_SINGLE_WIDE = {**_SINGLE, 'BLOCK': 16, 'num_warps': 8, 'RELOAD': EVERY}


def config(kernel: str, dtype: torch.dtype, dim: int, l2: bool, gpu: _launch.Gpu) -> dict:
    """Options to compile a kernel of an inner model and loss with."""
    if dtype == torch.float32:
        options = dict(_SINGLE if dim <= _launch.DIMS[0] else _SINGLE_WIDE)
        if kernel == 'read':
            options['BLOCK'] = 32
        if kernel == 'step_backward' and gpu.little:
            options['RELOAD'] = EVERY
    else:
        few = l2 or not gpu.warp_groups
        table = _CONFIGS | (_STEP_32 if few else {}) | (_LITTLE if gpu.little else {})
        options = dict(table[kernel])
        if gpu.one_stage:
            options['STAGES'] = 1
        # With fewer channels no product is WGMMA.
        if gpu.mma_sync and kernel == 'step_backward' and dim > _launch.DIMS[0]:
            options |= {'PRECISION': MMA_SYNC.value, 'most_registers': 255}
    registers = options.pop('most_registers', None)
    options |= _launch.most_registers(registers) if registers else {}
    options['RELOAD'] = options['RELOAD'].value
    return {'PRECISION': _launch.precision(dtype), **options}


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments, or None where they can."""
    return _launch.unsupported_heads_reason(args.q)


@_launch.plan
def _planned(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    gated: bool,
    l2: bool,
    *strides: tuple[int, ...],
) -> tuple[_launch.Pass, _launch.Pass]:
    gpu = _launch.gpu(_NAME, dtype, device)

    def options(kernel: str) -> dict:
        loss = {'L2': l2} if kernel.startswith('step') else {}
        return config(kernel, dtype, shape[-1], l2, gpu) | {'GATED': gated, **loss}

    kernels = (_step, _read), (_step_backward, _read_backward)
    return _launch.passes(*kernels, options, shape, strides)


def _padded(w1: Tensor, w2: Tensor, w3: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights of a size for which there are kernels."""
    w1, w2 = _launch.pad(w1, w2, axes=2)
    return w1, w2, None if w3 is None else _launch.pad(w3, axes=2)[0]


def _stacked(w1: Tensor, w2: Tensor, w3: Tensor | None) -> Tensor:
    """`(H, 2|3, d, d)`."""
    return torch.stack([w1, w2] if w3 is None else [w1, w2, w3], dim=1)


def _stepped(weights: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """W′ = W − G `(B, H, 2|3, d, d)` in the type of the tokens."""
    return torch.sub(weights, g, out=torch.empty_like(g, dtype=dtype))


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """O `(B, N, H, d)` and G `(B, H, 2|3, d, d)`, as in the reference."""
    q, k, v, w1, w2, w3, scale, loss = args
    batch, tokens, heads, dim = q.shape
    if dim not in _launch.DIMS:
        q, k, v = _launch.pad(q, k, v)
        o, g = forward((q, k, v, *_padded(w1, w2, w3), scale, loss))
        return _launch.unpad(o, width=dim)[0], _launch.unpad(g, width=dim, axes=2)[0]
    l2, weights = loss == 'l2', _stacked(w1, w2, w3)
    (q, k, v), strides = _launch.dense(q, k, v)
    step, read = _planned(q.shape, q.dtype, q.device, w3 is not None, l2, *strides)
    splits = step.splits
    g = w1.new_empty((step.sums, splits, *weights.shape[1:]))
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    scale = scale if l2 else -scale
    factor, divisor = (scale, tokens) if splits == 1 else (1.0, 1)
    with _launch.on(q):
        step.launch(k=k, v=v, weights=weights.to(q.dtype), g=g, factor=factor, divisor=divisor)
        if splits > 1:
            g = _launch.add_up(g, scale, tokens)
        g = g.view(batch, heads, *weights.shape[1:])
        read.launch(q=q, stepped=_stepped(weights, g, q.dtype), o=o)
    return o, g


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """dq, dk, dv `(B, N, H, d)` and dw1, dw2, dw3 `(H, d, d)`, as in the reference."""
    (do,), (q, k, v, w1, w2, w3, scale, loss), (g,) = grads, args, kept
    dim = q.shape[-1]
    if dim not in _launch.DIMS:
        (do, q, k, v), (g,) = _launch.pad(do, q, k, v), _launch.pad(g, axes=2)
        out = backward([do], (q, k, v, *_padded(w1, w2, w3), scale, loss), [g])
        dq, dk, dv = _launch.unpad(*out[:3], width=dim)
        dw1, dw2 = _launch.unpad(*out[3:5], width=dim, axes=2)
        dw3 = out[5] if w3 is None else _launch.unpad(out[5], width=dim, axes=2)[0]
        return dq, dk, dv, dw1, dw2, dw3
    l2, weights = loss == 'l2', _stacked(w1, w2, w3)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    (do, q, k, v), strides = _launch.dense(do, q, k, v)
    step, read = _planned(q.shape, q.dtype, q.device, w3 is not None, l2, *strides)
    dw = g.new_empty((read.sums, read.splits, *g.shape[2:]))
    dw_step = g.new_empty((step.sums, step.splits, *g.shape[2:]))
    with _launch.on(q):
        read.launch(do=do, q=q, stepped=_stepped(weights, g, q.dtype), dq=dq, dw=dw)
        dw = _launch.add_up(dw)
        j, peak = _launch.relative(dw, q.dtype)
        factor = -scale if l2 else scale
        tensors = {'k': k, 'v': v, 'weights': weights.to(q.dtype), 'j': j, 'peak': peak}
        step.launch(**tensors, dk=dk, dv=dv, dw=dw_step, factor=factor)
        dw = dw.add_(_launch.add_up(dw_step)).view(g.shape)
    dw1, dw2, *rest = (x.sum(0) for x in dw.unbind(2))
    return dq, dk, dv, dw1, dw2, rest[0] if rest else w1.new_empty(0)
