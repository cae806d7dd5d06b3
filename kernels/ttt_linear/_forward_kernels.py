"""Forward kernels of TTT-linear (App. A): the scan, and its output where that is apart."""

import triton
import triton.language as tl

from .._triton import add_dot, dot
from ._tiles import (
    CHUNK,
    VARYING,
    add_outer,
    apply_state,
    column,
    concat_features,
    dense_scan_of,
    descent_step,
    kept_cast,
    load_features,
    load_rows,
    load_state,
    load_state_before,
    load_tile,
    normalized,
    repeat_blocks,
    saturating_cast,
    scan_of,
    split_features,
    store_state,
    store_tile,
    subtract_mean,
    sum_features3,
    token_scales,
)


@triton.jit
def inner_gradient(z, k, v, gamma, lam, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """G = Π(γ⊙(γX + λ − (V − K))) of a chunk, in blocks, from the saved Z = KW + c.

    Exactly, the mean of Z and so of G is zero. The rounding error m of that mean would give G, with
    which the state is updated, the mean −m·mean(P⊙X)/σ². With small tokens that exceeds m, and the
    error grows exponentially: it is subtracted together with the mean of P.
    """
    x, rstd = normalized(z, eps, D, WIDTH)
    residual = split_features(k, D).to(z.dtype) - split_features(v, D).to(z.dtype)
    p = gamma * (gamma * x + lam + residual)
    sum_p, sum_px, sum_x = sum_features3(p, p * x, x)
    mean_px = sum_px / WIDTH
    p = subtract_mean(p, column((sum_p - sum_x * mean_px) / WIDTH), D, WIDTH)
    return (p - x * column(mean_px)) * rstd


@triton.jit
def step_weights(q, k, steps, tau, D: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """−M = −E⊙(QKᵀ + 1) of a chunk, for every block: the effect of its steps on the outputs."""
    causal = tl.arange(0, CHUNK)[:, None] >= tl.arange(0, CHUNK)[None, :]
    qk = dot(q, tl.trans(k), ACC, PRECISION) + 1
    m = saturating_cast(tl.where(causal, -tau[:, None] * steps[None, :] * qk, 0), q)
    return repeat_blocks(m, D)


@triton.jit
def output(z, q, gamma, lam, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """O = Q + γ⊙LN̂(Z̄) + λ, `(16, D)`, from Z̄ in blocks."""
    x, _ = normalized(z, eps, D, WIDTH)
    return concat_features(split_features(q, D).to(z.dtype) + gamma * x + lam, D)


@triton.jit(do_not_specialize=VARYING)
def forward_scan(
    tokens,  # q, k, v (B, T, R, H, D), features dense; eta (B, T, R, H), contiguous like the rest
    strides,  # of q, k, v
    parameters,  # w0 (R, H, D, D); b0, ln_weight, ln_bias (R, H, D); token_scale (R, b)
    o,  # (B, T, R, H, D); with APART it gets G
    kept,  # Z (B, T, R, H, D); W (B, R, H, segments, D, D) and c (B, R, H, segments, D)
    T,
    R,
    H,
    reverse_mask,
    segment,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEEP: tl.constexpr,
    APART: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program runs one scan, and with KEEP writes Z and the states.

    With APART it writes G and the states, from which `forward_output` computes the output.
    """
    scan = tl.program_id(0)
    q, k, v, eta = tokens
    w0, b0, ln_weight, ln_bias, token_scale = parameters
    z_kept, w_kept, c_kept = kept
    ACC: tl.constexpr = w0.dtype.element_ty
    q, q_step = scan_of(q, strides[0], scan, T, R, H, reverse_mask)
    k, k_step = scan_of(k, strides[1], scan, T, R, H, reverse_mask)
    v, v_step = scan_of(v, strides[2], scan, T, R, H, reverse_mask)
    eta, eta_step = dense_scan_of(eta, 1, scan, T, R, H, reverse_mask)
    o, o_step = dense_scan_of(o, D, scan, T, R, H, reverse_mask)
    if KEEP:
        z_kept, _ = dense_scan_of(z_kept, D, scan, T, R, H, reverse_mask)
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    lam = load_features(ln_bias + head * D, D)
    s, c = load_state(w0 + head * D * D, b0 + head * D, D, WIDTH)
    chunks = tl.cdiv(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    # Prefetches the tokens of the next chunk, except V, which a chunk needs late.
    k_next = load_tile(k, k_step, 0, T, D, SIZE)
    q_next = load_tile(q, q_step, 0, T, D, SIZE)
    steps_next = load_rows(eta, eta_step, 0, T, SIZE)
    # Two loops, so that storing a state takes no registers from the chunks between.
    for i in range(segments):
        last = tl.minimum(i * segment + segment, chunks)
        for n in tl.range(i * segment, last, num_stages=1):
            k_tile, q_tile, steps = k_next, q_next, steps_next
            v_tile = load_tile(v, v_step, n, T, D, SIZE)
            k_next = load_tile(k, k_step, n + 1, T, D, SIZE)
            q_next = load_tile(q, q_step, n + 1, T, D, SIZE)
            steps_next = load_rows(eta, eta_step, n + 1, T, SIZE)
            # Rounded like the saved copy, so that the backward pass computes the same G.
            z_tile = kept_cast(apply_state(s, c, k_tile, D, PRECISION), k_tile)
            if KEEP:
                store_tile(z_kept, o_step, n, T, concat_features(z_tile, D), D, SIZE)
            if not APART:
                zq = apply_state(s, c, q_tile, D, PRECISION)
                m = step_weights(q_tile, k_tile, steps, tau, D, PRECISION, ACC)
            grad = inner_gradient(z_tile.to(ACC), k_tile, v_tile, gamma, lam, eps, D, WIDTH)
            g_tile = saturating_cast(grad, k_tile)
            eg = descent_step(g_tile, column(tau_last * steps))
            s, c = add_outer(s, c, eg, k_tile, D, PRECISION)
            if APART:
                o_tile = concat_features(g_tile, D)
            else:
                zq = add_dot(zq, m, g_tile, PRECISION)
                o_tile = output(zq, q_tile, gamma, lam, eps, D, WIDTH)
            store_tile(o, o_step, n, T, o_tile, D, SIZE)
        if KEEP or APART:
            slot = tl.cast(scan, tl.int64) * segments + i
            store_state(w_kept + slot * D * D, c_kept + slot * D, s, c, D)


@triton.jit(do_not_specialize=VARYING)
def forward_output(
    tokens,  # q, k (B, T, R, H, D), features dense; eta (B, T, R, H), contiguous like the rest
    strides,  # of q, k
    parameters,  # as in `forward_scan`
    g,  # (B, T, R, H, D)
    o,
    states,  # W (B, R, H, segments, D, D) and c (B, R, H, segments, D)
    T,
    R,
    H,
    reverse_mask,
    segment,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program writes the output of one segment of a scan, from the state before it and G."""
    chunks = tl.cdiv(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    part = tl.program_id(0) % segments
    q, k, eta = tokens
    w0, b0, ln_weight, ln_bias, token_scale = parameters
    ACC: tl.constexpr = w0.dtype.element_ty
    q, q_step = scan_of(q, strides[0], scan, T, R, H, reverse_mask)
    k, k_step = scan_of(k, strides[1], scan, T, R, H, reverse_mask)
    eta, eta_step = dense_scan_of(eta, 1, scan, T, R, H, reverse_mask)
    g, _ = dense_scan_of(g, D, scan, T, R, H, reverse_mask)
    o, o_step = dense_scan_of(o, D, scan, T, R, H, reverse_mask)
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    lam = load_features(ln_bias + head * D, D)
    s, c = load_state_before(part, w0, b0, states[0], states[1], scan, head, segments, D, WIDTH)
    first = part * segment
    k_next = load_tile(k, k_step, first, T, D, SIZE)
    q_next = load_tile(q, q_step, first, T, D, SIZE)
    g_next = load_tile(g, o_step, first, T, D, SIZE)
    steps_next = load_rows(eta, eta_step, first, T, SIZE)
    for n in tl.range(first, tl.minimum(first + segment, chunks), num_stages=1):
        k_tile, q_tile, g_tile, steps = k_next, q_next, g_next, steps_next
        k_next = load_tile(k, k_step, n + 1, T, D, SIZE)
        q_next = load_tile(q, q_step, n + 1, T, D, SIZE)
        g_next = load_tile(g, o_step, n + 1, T, D, SIZE)
        steps_next = load_rows(eta, eta_step, n + 1, T, SIZE)
        zq = apply_state(s, c, q_tile, D, PRECISION)
        m = step_weights(q_tile, k_tile, steps, tau, D, PRECISION, ACC)
        zq = add_dot(zq, m, split_features(g_tile, D), PRECISION)
        store_tile(o, o_step, n, T, output(zq, q_tile, gamma, lam, eps, D, WIDTH), D, SIZE)
        eg = descent_step(g_tile, (tau_last * steps)[:, None])
        s, c = add_outer(s, c, split_features(eg, D), k_tile, D, PRECISION)
