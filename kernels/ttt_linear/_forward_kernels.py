"""Forward kernels of TTT-linear (App. A): the scan, with its output or with a parallel output."""

import triton
import triton.language as tl

from ._tiles import (
    CHUNK,
    VARYING,
    add_outer,
    add_product,
    column,
    dense_start,
    every,
    joined,
    less_mean,
    load_features,
    load_rows,
    load_state,
    load_state_before,
    load_tile,
    operand,
    product,
    query_state,
    scan_start,
    split,
    store_state,
    store_tile,
    token_scales,
    total,
    totals2,
)


@triton.jit
def inner_gradient(z, k, v, gamma, lam, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """G = Π(γ⊙(γX + λ − (V − K))) of a chunk, in blocks, from Z = KW + c."""
    rstd = column(tl.rsqrt(total(z * z) / WIDTH + eps))
    x = z * rstd
    residual = split(k, D).to(z.dtype) - split(v, D).to(z.dtype)
    p = gamma * (gamma * x + (lam + residual))
    mean_p, mean_px = totals2(p, p * x)
    p = less_mean(p, column(mean_p / WIDTH), D, WIDTH)
    return operand((p - x * column(mean_px / WIDTH)) * rstd, k)


@triton.jit
def output(
    z,
    k,
    q,
    g,
    steps,
    tau,
    gamma,
    lam,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """O = Q + γ⊙LN̂(Z̄) + λ, `(16, D)`, from QW + c and G, both in blocks."""
    causal = tl.arange(0, CHUNK)[:, None] >= tl.arange(0, CHUNK)[None, :]
    scores = product(q, tl.trans(k), PRECISION, z.dtype) + 1
    m = operand(tl.where(causal, -tau[:, None] * steps[None, :] * scores, 0), q)
    z = add_product(z, every(m, D), g, PRECISION)
    x = z * column(tl.rsqrt(total(z * z) / WIDTH + eps))
    return joined(split(q, D).to(z.dtype) + gamma * x + lam, D)


@triton.jit(do_not_specialize=VARYING)
def forward_scan(
    q,  # (B, T, R, H, D), any strides but the last
    k,
    v,
    eta,  # (B, T, R, H), any strides
    w0,  # (R, H, D, D), contiguous like all that follow
    b0,
    ln_weight,
    ln_bias,
    token_scale,  # (R, 16)
    o,  # (B, T, R, H, D)
    g,
    w_kept,  # (B, R, H, segments, D, D)
    c_kept,
    q_b,
    q_t,
    q_r,
    q_h,
    k_b,
    k_t,
    k_r,
    k_h,
    v_b,
    v_t,
    v_r,
    v_h,
    eta_b,
    eta_t,
    eta_r,
    eta_h,
    T,
    R,
    H,
    reverse_mask,
    segment,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program runs one scan: QUERY writes its output, KEEP writes G and the states."""
    scan = tl.program_id(0)
    ACC: tl.constexpr = w0.dtype.element_ty
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    v_start, v_step = scan_start(scan, T, R, H, reverse_mask, v_b, v_t, v_r, v_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    o_start, o_step = dense_start(scan, T, R, H, reverse_mask, D)
    k += k_start
    v += v_start
    eta += e_start
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    lam = load_features(ln_bias + head * D, D)
    s, c = load_state(w0 + head * D * D, b0 + head * D, D, WIDTH)
    chunks = tl.cdiv(T, CHUNK)
    segments = tl.cdiv(chunks, segment)
    # The tokens of the next chunk are on their way while this one is computed.
    k_next = load_tile(k, k_step, 0, T, D)
    v_next = load_tile(v, v_step, 0, T, D)
    e_next = load_rows(eta, e_step, 0, T)
    if QUERY:
        q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_b, q_t, q_r, q_h)
        q += q_start
        o += o_start
        q_next = load_tile(q, q_step, 0, T, D)
    if KEEP:
        g += o_start
    # Two loops, so that storing a state takes no registers from the chunks between.
    for i_s in range(segments):
        last = tl.minimum(i_s * segment + segment, chunks)
        for n in tl.range(i_s * segment, last, num_stages=1):
            k_tile, v_tile, steps = k_next, v_next, e_next
            k_next = load_tile(k, k_step, n + 1, T, D)
            v_next = load_tile(v, v_step, n + 1, T, D)
            e_next = load_rows(eta, e_step, n + 1, T)
            z = query_state(s, c, k_tile, D, PRECISION)
            if QUERY:
                q_tile = q_next
                q_next = load_tile(q, q_step, n + 1, T, D)
                zq = query_state(s, c, q_tile, D, PRECISION)
            g_tile = inner_gradient(z, k_tile, v_tile, gamma, lam, eps, D, WIDTH)
            eg = operand(g_tile.to(ACC) * column(-tau_last * steps), k_tile)
            s, c = add_outer(s, c, eg, k_tile, D, PRECISION)
            if KEEP:
                store_tile(g, o_step, n, T, joined(g_tile, D), D)
            if QUERY:
                o_tile = output(
                    zq, k_tile, q_tile, g_tile, steps, tau, gamma, lam, eps, D, WIDTH, PRECISION
                )
                store_tile(o, o_step, n, T, o_tile, D)
        if KEEP:
            slot = tl.cast(scan, tl.int64) * segments + i_s
            store_state(w_kept + slot * D * D, c_kept + slot * D, s, c, D)


@triton.jit(do_not_specialize=VARYING)
def forward_output(
    q,  # (B, T, R, H, D), any strides but the last
    k,
    eta,  # (B, T, R, H), any strides
    w0,  # (R, H, D, D), contiguous like all that follow
    b0,
    ln_weight,
    ln_bias,
    token_scale,  # (R, 16)
    g,  # (B, T, R, H, D)
    o,
    w_kept,  # (B, R, H, segments, D, D)
    c_kept,
    q_b,
    q_t,
    q_r,
    q_h,
    k_b,
    k_t,
    k_r,
    k_h,
    eta_b,
    eta_t,
    eta_r,
    eta_h,
    T,
    R,
    H,
    reverse_mask,
    segment,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program writes the output of one segment of a scan, from the state before it and G."""
    chunks = tl.cdiv(T, CHUNK)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    i_s = tl.program_id(0) % segments
    ACC: tl.constexpr = w0.dtype.element_ty
    q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_b, q_t, q_r, q_h)
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    o_start, o_step = dense_start(scan, T, R, H, reverse_mask, D)
    q += q_start
    k += k_start
    eta += e_start
    g += o_start
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    lam = load_features(ln_bias + head * D, D)
    s, c = load_state_before(i_s, w0, b0, w_kept, c_kept, scan, head, segments, D, WIDTH)
    first = i_s * segment
    k_next = load_tile(k, k_step, first, T, D)
    q_next = load_tile(q, q_step, first, T, D)
    g_next = load_tile(g, o_step, first, T, D)
    e_next = load_rows(eta, e_step, first, T)
    for n in tl.range(first, tl.minimum(first + segment, chunks), num_stages=1):
        k_tile, q_tile, g_tile, steps = k_next, q_next, g_next, e_next
        k_next = load_tile(k, k_step, n + 1, T, D)
        q_next = load_tile(q, q_step, n + 1, T, D)
        g_next = load_tile(g, o_step, n + 1, T, D)
        e_next = load_rows(eta, e_step, n + 1, T)
        z = query_state(s, c, q_tile, D, PRECISION)
        eg = operand(g_tile.to(ACC) * (-tau_last * steps)[:, None], k_tile)
        o_tile = output(
            z, k_tile, q_tile, split(g_tile, D), steps, tau, gamma, lam, eps, D, WIDTH, PRECISION
        )
        store_tile(o + o_start, o_step, n, T, o_tile, D)
        s, c = add_outer(s, c, split(eg, D), k_tile, D, PRECISION)
