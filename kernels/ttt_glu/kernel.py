"""Triton kernels of ViT³'s gated inner model: two passes over the tokens forward, two backward.

Forward: `_step` sums the inner gradients G over k and v. `_read` takes the damped step when it
    loads the weights, and reads q. Backward: `_read_backward` goes over q and dO and sums the
    gradients of the updated weights. `_step_gradients` converts them to `j = −κH` for
    `_step_backward`, over k and v. If few (image, head) pairs would leave a GPU idle, several
    programs share a sum (`_launch`).

q, k, v and dO are read in place by their strides. [W1 | W2] and all their gradients are `(d, 2d)`
tiles in memory, and two `(d, d)` tiles in a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _launch
from .._op import Args, Grads
from .._triton import (
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

_NAME = 'ttt_glu'

# ------------------------------------------------------------------------------------------- tiles


@triton.jit
def _column_sums(x, y):
    """Σ x·y over the rows.

    The compiler would fuse a product with a sum over lanes into an operation that rounds
    differently in every lane, and which lane's sum all get is undefined.
    """
    return tl.sum(tl.fma(x, y, tl.zeros_like(x)), axis=0)


@triton.jit
def _stepped(w, g, D: tl.constexpr, DAMPING: tl.constexpr):
    """W′ = W − G/(‖G‖ + 1), with the norm of every column."""
    g = tl.load(g + square(D, 2 * D))
    if DAMPING:
        g = g / (tl.sqrt(_column_sums(g, g)) + 1)[None, :]
    return tl.load(w + square(D, D)) - g


@triton.jit
def _step_gradient(g, dw, D: tl.constexpr, DAMPING: tl.constexpr):
    """−H: the gradient with respect to −G, from the gradient of W′ through the damping.

    Subtracts the component along G from dW′ twice: rounding leaves some of it the first time, and
    the rest of the result may be smaller than that by a factor of ‖G‖.
    """
    g = tl.load(g + square(D, 2 * D))
    dw = tl.load(dw + square(D, 2 * D))
    if DAMPING:
        norm = tl.sqrt(_column_sums(g, g))
        unit = g / tl.where(norm == 0, 1, norm)[None, :]
        along = _column_sums(unit, dw)
        dw = dw - unit * along[None, :]
        left = _column_sums(unit, dw)
        dw = dw - unit * left[None, :]
        dw = (dw + unit * ((along + left) / (norm + 1))[None, :]) / (norm + 1)[None, :]
    return dw


# ----------------------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits', 'divisor'])
def _step(
    k,  # (B, N, H, D), any strides but the last
    v,
    w1,  # (H, D, D)
    w2,
    g,  # (B, H, splits, D, 2·D)
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
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums `[Kᵀ(V⊙a) | Kᵀ(V⊙z1⊙a′)]·factor/divisor` over a span of tokens, a = silu(z2)."""
    ACC: tl.constexpr = g.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    k += start(program, H, k_strides)
    v += start(program, H, v_strides)
    weights = program % H * D * D + square(D, D)
    w1_tile = tl.load(w1 + weights).to(k.dtype.element_ty)
    w2_tile = tl.load(w2 + weights).to(k.dtype.element_ty)
    g1 = tl.zeros((D, D), ACC)
    g2 = tl.zeros((D, D), ACC)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        k_tile = load_tokens(k, n, last, k_strides[1], D, BLOCK)
        v_tile = load_tokens(v, n, last, v_strides[1], D, BLOCK).to(ACC)
        z1 = tl.dot(k_tile, w1_tile, input_precision=PRECISION, out_dtype=ACC)
        z2 = tl.dot(k_tile, w2_tile, input_precision=PRECISION, out_dtype=ACC)
        a, slope, _ = silu(z2)
        k_columns = tl.trans(k_tile)
        e1 = (v_tile * a).to(k_tile.dtype)
        e2 = (v_tile * z1 * slope).to(k_tile.dtype)
        g1 = add_dot(g1, k_columns, e1, PRECISION)
        g2 = add_dot(g2, k_columns, e2, PRECISION)
    g += tl.program_id(0).to(tl.int64) * 2 * D * D
    tl.store(g + square(D, 2 * D), g1 * factor / divisor)
    tl.store(g + D + square(D, 2 * D), g2 * factor / divisor)


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits'])
def _read(
    q,  # (B, N, H, D), any strides but the last
    w1,  # (H, D, D)
    w2,
    g,  # (B, H, D, 2·D)
    o,  # (B, N, H, D)
    q_strides,
    N,
    H,
    span,
    splits,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DAMPING: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """O = (QW1′)⊙silu(QW2′) of a span of tokens."""
    ACC: tl.constexpr = g.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    q += start(program, H, q_strides)
    o += dense_start(program, N, H, D)
    g += program.to(tl.int64) * 2 * D * D
    weights = program % H * D * D
    w1_tile = _stepped(w1 + weights, g, D, DAMPING).to(q.dtype.element_ty)
    w2_tile = _stepped(w2 + weights, g + D, D, DAMPING).to(q.dtype.element_ty)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        q_tile = load_tokens(q, n, last, q_strides[1], D, BLOCK)
        u1 = tl.dot(q_tile, w1_tile, input_precision=PRECISION, out_dtype=ACC)
        u2 = tl.dot(q_tile, w2_tile, input_precision=PRECISION, out_dtype=ACC)
        store_tokens(o, n, last, H * D, u1 * u2 * tl.sigmoid(u2), D, BLOCK)


# ---------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits'])
def _read_backward(
    do,  # (B, N, H, D), any strides but the last
    q,
    w1,  # (H, D, D)
    w2,
    g,  # (B, H, D, 2·D)
    dq,  # (B, N, H, D)
    dw,  # (B, H, splits, D, 2·D)
    do_strides,
    q_strides,
    N,
    H,
    span,
    splits,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DAMPING: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ = dU1·W1′ᵀ + dU2·W2′ᵀ, and [dW1′ | dW2′] = Qᵀ[dU1 | dU2] of a span of tokens."""
    ACC: tl.constexpr = dw.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    do += start(program, H, do_strides)
    q += start(program, H, q_strides)
    dq += dense_start(program, N, H, D)
    g += program.to(tl.int64) * 2 * D * D
    weights = program % H * D * D
    w1_tile = _stepped(w1 + weights, g, D, DAMPING).to(q.dtype.element_ty)
    w2_tile = _stepped(w2 + weights, g + D, D, DAMPING).to(q.dtype.element_ty)
    dw1 = tl.zeros((D, D), ACC)
    dw2 = tl.zeros((D, D), ACC)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        q_tile = load_tokens(q, n, last, q_strides[1], D, BLOCK)
        do_tile = load_tokens(do, n, last, do_strides[1], D, BLOCK).to(ACC)
        u1 = tl.dot(q_tile, w1_tile, input_precision=PRECISION, out_dtype=ACC)
        u2 = tl.dot(q_tile, w2_tile, input_precision=PRECISION, out_dtype=ACC)
        b, slope, _ = silu(u2)
        du1 = (do_tile * b).to(q_tile.dtype)
        du2 = (do_tile * u1 * slope).to(q_tile.dtype)
        out = tl.dot(du1, tl.trans(w1_tile), input_precision=PRECISION, out_dtype=ACC)
        out = tl.dot(du2, tl.trans(w2_tile), out, input_precision=PRECISION, out_dtype=ACC)
        store_tokens(dq, n, last, H * D, out, D, BLOCK)
        q_columns = tl.trans(q_tile)
        dw1 = add_dot(dw1, q_columns, du1, PRECISION)
        dw2 = add_dot(dw2, q_columns, du2, PRECISION)
    dw += tl.program_id(0).to(tl.int64) * 2 * D * D
    tl.store(dw + square(D, 2 * D), dw1)
    tl.store(dw + D + square(D, 2 * D), dw2)


@triton.jit(do_not_specialize=['H'])
def _step_gradients(
    g,  # (B, H, D, 2·D)
    dw,  # (B, H, D, 2·D): dW′ over all tokens
    w1,  # (H, D, D)
    w2,
    j,  # (H + B·H, 2, D, D), in the type of the tokens: w1 and w2, then j of every sum
    peak,  # (B, H)
    H,
    D: tl.constexpr,
    DAMPING: tl.constexpr,
):
    """j over 16 times its largest entry, as in `_launch.relative`, and that divisor.

    Also rounds the weights: rounded in `_step_backward` they would be operands in registers.
    """
    program = tl.program_id(0).to(tl.int64)
    g += program * 2 * D * D
    dw += program * 2 * D * D
    weights = j + program * 2 * D * D + square(D, D)
    j = weights + H * 2 * D * D
    j1 = _step_gradient(g, dw, D, DAMPING)
    j2 = _step_gradient(g + D, dw + D, D, DAMPING)
    largest = tl.maximum(tl.max(tl.abs(j1)), tl.max(tl.abs(j2)))
    largest = tl.where(largest == 0, 1, largest) * 16
    tl.store(j, (j1 / largest).to(j.dtype.element_ty))
    tl.store(j + D * D, (j2 / largest).to(j.dtype.element_ty))
    tl.store(peak + program, largest)
    if program < H:
        place = program * D * D + square(D, D)
        tl.store(weights, tl.load(w1 + place).to(j.dtype.element_ty))
        tl.store(weights + D * D, tl.load(w2 + place).to(j.dtype.element_ty))


@triton.jit(do_not_specialize=['N', 'H', 'span', 'splits'])
def _step_backward(
    k,  # (B, N, H, D), any strides but the last
    v,
    j,  # (H + B·H, 2, D, D), in the tokens' type: w1 and w2, then j over `peak`
    peak,  # (B, H)
    dk,  # (B, N, H, D)
    dv,
    dw,  # (B, H, splits, D, 2·D): dW′ of this split's tokens, to which it adds
    k_strides,
    v_strides,
    factor,
    N,
    H,
    span,
    splits,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RELOAD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK, dV and the step's part of dW for a span of tokens, all linear in j.

    Feature-major, `(D, BLOCK)`, as in ttt_mlp: computed matrices are always second operands. RELOAD
    is ttt_mlp's EVERY, in fp32.
    """
    ACC: tl.constexpr = dw.dtype.element_ty
    TYPE: tl.constexpr = k.dtype.element_ty
    program, first, last = share_of(splits, span, N)
    k += start(program, H, k_strides)
    v += start(program, H, v_strides)
    out_start = dense_start(program, N, H, D)
    dk += out_start
    dv += out_start
    dw += tl.program_id(0).to(tl.int64) * 2 * D * D
    at_w1 = j + program % H * 2 * D * D + square(D, D)
    at_w2 = at_w1 + D * D
    w1, w2 = tl.load(at_w1), tl.load(at_w2)
    at_j1 = j + (H + program).to(tl.int64) * 2 * D * D + square(D, D)
    at_j2 = at_j1 + D * D
    j1, j2 = tl.load(at_j1), tl.load(at_j2)
    scale = tl.load(peak + program) * factor / N
    sum1 = tl.zeros((D, D), ACC)
    sum2 = tl.zeros((D, D), ACC)
    for n in tl.range(first, last, BLOCK, num_stages=STAGES):
        k_columns = tl.trans(load_tokens(k, n, last, k_strides[1], D, BLOCK))
        v_columns = tl.trans(load_tokens(v, n, last, v_strides[1], D, BLOCK)).to(ACC)
        a, slope, bend = silu(dot(tl.trans(again(w2, at_w2, RELOAD)), k_columns, ACC, PRECISION))
        z1 = dot(tl.trans(again(w1, at_w1, RELOAD)), k_columns, ACC, PRECISION)
        r1 = dot(tl.trans(again(j1, at_j1, RELOAD)), k_columns, ACC, PRECISION)
        r2 = dot(tl.trans(again(j2, at_j2, RELOAD)), k_columns, ACC, PRECISION)
        found = (r1 * a + r2 * z1 * slope) * scale
        store_tokens(dv, n, last, H * D, tl.trans(found), D, BLOCK)
        dz2 = (v_columns * (r1 * slope + r2 * z1 * bend)).to(TYPE)
        dz1 = (r2 * v_columns * slope).to(TYPE)
        out = dot(again(w2, at_w2, RELOAD), dz2, ACC, PRECISION)
        out = add_dot(out, again(w1, at_w1, RELOAD), dz1, PRECISION)
        out = add_dot(out, again(j1, at_j1, RELOAD), (v_columns * a).to(TYPE), PRECISION)
        out = add_dot(out, again(j2, at_j2, RELOAD), (v_columns * z1 * slope).to(TYPE), PRECISION)
        store_tokens(dk, n, last, H * D, tl.trans(out * scale), D, BLOCK)
        sum1 = add_dot(sum1, k_columns, tl.trans(dz1), PRECISION)
        sum2 = add_dot(sum2, k_columns, tl.trans(dz2), PRECISION)
    left = dw + square(D, 2 * D)
    tl.store(left, tl.load(left) + sum1 * scale)
    tl.store(left + D, tl.load(left + D) + sum2 * scale)


# -------------------------------------------------------------------------------------------- host


# Tokens of a block, warps and pipeline stages. tests/kernels/test_compile_kernels.py limits
# registers, spills and shared memory, and refuses WGMMA with an operand in registers, which ptxas
# before 13.3 may overwrite. Triton generates it for products with a computed first operand in
# blocks of 64 tokens, and for all products in fp32.
_HALF = {
    'step': {'BLOCK': 64, 'num_warps': 4, 'STAGES': 2},
    'read': {'BLOCK': 64, 'num_warps': 4, 'STAGES': 2},
    'read_backward': {'BLOCK': 32, 'num_warps': 4, 'STAGES': 2},
    'step_backward': {'BLOCK': 32, 'num_warps': 4, 'STAGES': 2},
}
_SINGLE = {'BLOCK': 32, 'num_warps': 4, 'STAGES': 1}
# At d = 64 a product takes three times the registers of its operands: eight warps, fewer tokens.
_WIDE = {'num_warps': 8, 'STAGES': 1}
_SINGLE_WIDE = {
    'step': {'BLOCK': 32, **_WIDE},
    'read': {'BLOCK': 32, **_WIDE},
    'read_backward': {'BLOCK': 16, **_WIDE},
    'step_backward': {'BLOCK': 16, **_WIDE},
}


# In `_read_backward` every WGMMA operand has passed through registers and a fence.
_COPIED = ('step', 'read', 'step_backward')


def config(kernel: str, dtype: torch.dtype, dim: int, gpu: _launch.Gpu) -> dict:
    """Options to compile a kernel for tokens of `dtype` and `dim` channels with."""
    half = dtype in (torch.float16, torch.bfloat16)
    wide = dtype == torch.float32 and dim > _launch.DIMS[0]
    sizes = _HALF[kernel] if half else _SINGLE_WIDE[kernel] if wide else _SINGLE
    options: dict = {**sizes, 'PRECISION': _launch.precision(dtype)}
    if gpu.one_stage and kernel in _COPIED:
        options['STAGES'] = 1
    if kernel == 'step_backward':
        options['RELOAD'] = wide
    return options | (_launch.most_registers(255) if wide else {})


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments, or None where they can."""
    q, dim = args.q, args.q.shape[-1]
    if (
        q.dtype == torch.float32
        and dim > _launch.DIMS[0]
        and _launch.gpu(_NAME, q.dtype, q.device).little
    ):
        return f'q is torch.float32 with d = {dim}, for which this GPU has too little shared memory'
    return _launch.unsupported_heads_reason(q)


@_launch.plan
def _planned(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    damping: bool,
    *strides: tuple[int, ...],
) -> tuple[_launch.Pass, _launch.Pass, _launch.Launch]:
    """As `_launch.passes`, and the launch of `_step_gradients`."""
    batch, _, heads, dim = shape
    gpu = _launch.gpu(_NAME, dtype, device)

    def options(kernel: str) -> dict:
        damped = {'DAMPING': damping} if kernel.startswith('read') else {}
        return config(kernel, dtype, dim, gpu) | damped

    kernels = (_step, _read), (_step_backward, _read_backward)
    sizes = {'H': heads, 'D': dim, 'DAMPING': damping}
    gradients = _launch.Launch(_step_gradients, (batch * heads,), **sizes)
    return *_launch.passes(*kernels, options, shape, strides), gradients


def _apart(g: Tensor) -> Tensor:
    """The two gradients `(B, H, 2, d, d)` in a G `(B, H, d, 2d)`."""
    return g.unflatten(-1, (2, -1)).transpose(-3, -2)


def _beside(g: Tensor) -> Tensor:
    """The inverse of `_apart`."""
    return g.transpose(-3, -2).flatten(-2)


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """O `(B, N, H, d)` and G before damping `(B, H, d, 2d)`, as in the reference."""
    q, k, v, w1, w2, scale, damping = args
    batch, tokens, heads, dim = q.shape
    if dim not in _launch.DIMS:
        w1, w2 = _launch.pad(w1, w2, axes=2)
        q, k, v = _launch.pad(q, k, v)
        o, g = forward((q, k, v, w1, w2, scale, damping))
        (o,), (g,) = _launch.unpad(o, width=dim), _launch.unpad(_apart(g), width=dim, axes=2)
        return o, _beside(g)
    weights = {'w1': w1.contiguous(), 'w2': w2.contiguous()}
    (q, k, v), strides = _launch.dense(q, k, v)
    step, read, _ = _planned(q.shape, q.dtype, q.device, damping, *strides)
    splits, shape = step.splits, (batch, heads, dim, 2 * dim)
    g = w1.new_empty(shape if splits == 1 else (step.sums, splits, *shape[2:]))
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    factor, divisor = (-scale, tokens) if splits == 1 else (1.0, 1)
    with _launch.on(q):
        step.launch(k=k, v=v, **weights, g=g, factor=factor, divisor=divisor)
        if splits > 1:
            g = _launch.add_up(g, -scale, tokens).view(shape)
        read.launch(q=q, **weights, g=g, o=o)
    return o, g


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """dq, dk, dv `(B, N, H, d)` and dw1, dw2 `(H, d, d)`, as in the reference."""
    (do,), (q, k, v, w1, w2, scale, damping), (g,) = grads, args, kept
    batch, _, heads, dim = q.shape
    if dim not in _launch.DIMS:
        w1, w2, g = _launch.pad(w1, w2, _apart(g), axes=2)
        do, q, k, v = _launch.pad(do, q, k, v)
        padded = q, k, v, w1, w2, scale, damping
        dq, dk, dv, *dw = backward([do], padded, [_beside(g)])
        return *_launch.unpad(dq, dk, dv, width=dim), *_launch.unpad(*dw, width=dim, axes=2)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    (do, q, k, v), strides = _launch.dense(do, q, k, v)
    # Both passes have the same blocks: the second adds to the partial sums of the first.
    step, read, gradients = _planned(q.shape, q.dtype, q.device, damping, *strides)
    sums, splits, _ = read
    dw = w1.new_empty((batch, heads, splits, dim, 2, dim))
    steps = {'j': q.new_empty((sums + heads, 2, dim, dim)), 'peak': dw.new_empty(sums)}
    weights = {'w1': w1.contiguous(), 'w2': w2.contiguous(), 'g': g.contiguous()}
    with _launch.on(q):
        read.launch(do=do, q=q, dq=dq, dw=dw, **weights)
        total = dw if splits == 1 else _launch.add_up(dw.flatten(0, 1))
        gradients(dw=total, **weights, **steps)
        step.launch(k=k, v=v, dk=dk, dv=dv, dw=dw, factor=scale, **steps)
    return dq, dk, dv, *(x.sum((0, 2)) for x in dw.unbind(-2))
