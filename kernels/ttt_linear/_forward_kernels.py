"""Forward kernels of TTT-linear (App. A): the scan, fused with the output or followed by it."""

import triton
import triton.language as tl

from .._triton import add_dot, dot
from ._tiles import (
    CHUNK,
    VARYING,
    add_outer,
    apply_state,
    carried_steps,
    chunk_count,
    column,
    concat_features,
    dense_start,
    descent_step,
    kept_cast,
    last_token_scale,
    load_features,
    load_rows,
    load_state,
    load_state_before,
    load_tile,
    mini_batch_chunks,
    normalized,
    outer_iterations,
    outer_stride,
    repeat_blocks,
    saturating_cast,
    scan_start,
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
    q,  # (B, T, R, H, D), any strides but the last
    k,
    v,
    eta,  # (B, T, R, H), any strides
    w0,  # (R, H, D, D), contiguous like all that follow
    b0,
    ln_weight,
    ln_bias,
    token_scale,  # (R, b)
    o,  # (B, T, R, H, D)
    z_kept,
    g,
    w_kept,  # (B, R, H, segments, D, D)
    c_kept,
    q_strides,
    k_strides,
    v_strides,
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
    SIZE: tl.constexpr,
    QUERY: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program runs one scan. QUERY writes its output, KEEP writes Z and the states.

    Without QUERY it writes G and the states, from which `forward_output` computes the output.
    """
    scan = tl.program_id(0)
    ACC: tl.constexpr = w0.dtype.element_ty
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_strides)
    v_start, v_step = scan_start(scan, T, R, H, reverse_mask, v_strides)
    eta_strides = (eta_b, eta_t, eta_r, eta_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_strides)
    o_start, o_step = dense_start(scan, T, R, H, reverse_mask, D)
    k += k_start
    v += v_start
    eta += e_start
    head = scan % (R * H)
    tau = token_scales(token_scale, head // H, 0, SIZE, HAS_SCALE, ACC)
    tau_last = last_token_scale(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    lam = load_features(ln_bias + head * D, D)
    s, c = load_state(w0 + head * D * D, b0 + head * D, D, WIDTH)
    chunks = chunk_count(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    # Prefetches the tokens of the next chunk, except V, which a chunk needs late.
    k_next = load_tile(k, k_step, 0, T, D, SIZE)
    e_next = load_rows(eta, e_step, 0, T, SIZE)
    if QUERY:
        q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_strides)
        q += q_start
        o += o_start
        q_next = load_tile(q, q_step, 0, T, D, SIZE)
    if KEEP:
        z_kept += o_start
    if not QUERY:
        g += o_start
    # Two loops, so that storing a state takes no registers from the chunks between.
    stride = outer_stride(segment, SIZE)
    for i in range(tl.cdiv(chunks, stride)):
        last = tl.minimum(i * stride + stride, chunks)
        # Sum that earlier chunks of the mini-batch add to the state, without τ.
        a, a_c = tl.zeros_like(s), tl.zeros_like(c)
        for n in tl.range(i * stride, last, num_stages=1):
            k_tile, steps = k_next, e_next
            v_tile = load_tile(v, v_step, n, T, D, SIZE)
            k_next = load_tile(k, k_step, n + 1, T, D, SIZE)
            e_next = load_rows(eta, e_step, n + 1, T, SIZE)
            # Rounded like the saved copy, so that the backward pass computes the same G.
            z_tile = kept_cast(apply_state(s, c, k_tile, D, PRECISION), k_tile)
            if QUERY:
                if KEEP:
                    store_tile(z_kept, o_step, n, T, concat_features(z_tile, D), D, SIZE)
                q_tile = q_next
                q_next = load_tile(q, q_step, n + 1, T, D, SIZE)
                zq = apply_state(s, c, q_tile, D, PRECISION)
                if mini_batch_chunks(SIZE) > 1:
                    tau = token_scales(token_scale, head // H, n, SIZE, HAS_SCALE, ACC)
                    zq += column(tau) * apply_state(a, a_c, q_tile, D, PRECISION)
                m = step_weights(q_tile, k_tile, steps, tau, D, PRECISION, ACC)
            grad = inner_gradient(z_tile.to(ACC), k_tile, v_tile, gamma, lam, eps, D, WIDTH)
            g_tile = saturating_cast(grad, k_tile)
            eg = descent_step(grad, column(carried_steps(steps, tau_last, SIZE)), k_tile)
            if mini_batch_chunks(SIZE) > 1:
                a, a_c = add_outer(a, a_c, eg, k_tile, D, PRECISION)
            else:
                s, c = add_outer(s, c, eg, k_tile, D, PRECISION)
            if QUERY:
                zq = add_dot(zq, m, g_tile, PRECISION)
                o_tile = output(zq, q_tile, gamma, lam, eps, D, WIDTH)
                store_tile(o, o_step, n, T, o_tile, D, SIZE)
            else:
                # If registers suffice, stores come after the work that the next chunk waits for.
                if KEEP:
                    store_tile(z_kept, o_step, n, T, concat_features(z_tile, D), D, SIZE)
                store_tile(g, o_step, n, T, concat_features(g_tile, D), D, SIZE)
        if mini_batch_chunks(SIZE) > 1:
            s, c = s + tau_last * a, c + tau_last * a_c
        ends = mini_batch_chunks(SIZE) == 1 or last % segment == 0 or last == chunks
        if (KEEP or not QUERY) and ends:
            kept = i if mini_batch_chunks(SIZE) == 1 else (last - 1) // segment
            slot = tl.cast(scan, tl.int64) * segments + kept
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
    token_scale,  # (R, b)
    g,  # (B, T, R, H, D)
    o,
    w_kept,  # (B, R, H, segments, D, D)
    c_kept,
    q_strides,
    k_strides,
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
    SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program writes the output of one segment of a scan, from the state before it and G."""
    chunks = chunk_count(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    i_s = tl.program_id(0) % segments
    ACC: tl.constexpr = w0.dtype.element_ty
    q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_strides)
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_strides)
    eta_strides = (eta_b, eta_t, eta_r, eta_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_strides)
    o_start, o_step = dense_start(scan, T, R, H, reverse_mask, D)
    q += q_start
    k += k_start
    eta += e_start
    g += o_start
    head = scan % (R * H)
    tau = token_scales(token_scale, head // H, 0, SIZE, HAS_SCALE, ACC)
    tau_last = last_token_scale(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    lam = load_features(ln_bias + head * D, D)
    s, c = load_state_before(i_s, w0, b0, w_kept, c_kept, scan, head, segments, D, WIDTH)
    first = i_s * segment
    last = tl.minimum(first + segment, chunks)
    k_next = load_tile(k, k_step, first, T, D, SIZE)
    q_next = load_tile(q, q_step, first, T, D, SIZE)
    g_next = load_tile(g, o_step, first, T, D, SIZE)
    e_next = load_rows(eta, e_step, first, T, SIZE)
    stride = outer_stride(segment, SIZE)
    for i in range(outer_iterations(first, last, SIZE)):
        start = first + i * stride
        a, a_c = tl.zeros_like(s), tl.zeros_like(c)
        for n in tl.range(start, tl.minimum(start + stride, last), num_stages=1):
            k_tile, q_tile, g_tile, steps = k_next, q_next, g_next, e_next
            k_next = load_tile(k, k_step, n + 1, T, D, SIZE)
            q_next = load_tile(q, q_step, n + 1, T, D, SIZE)
            g_next = load_tile(g, o_step, n + 1, T, D, SIZE)
            e_next = load_rows(eta, e_step, n + 1, T, SIZE)
            z = apply_state(s, c, q_tile, D, PRECISION)
            if mini_batch_chunks(SIZE) > 1:
                tau = token_scales(token_scale, head // H, n, SIZE, HAS_SCALE, ACC)
                z += column(tau) * apply_state(a, a_c, q_tile, D, PRECISION)
            eg = descent_step(g_tile.to(ACC), carried_steps(steps, tau_last, SIZE)[:, None], k_tile)
            g_blocks = split_features(g_tile, D)
            m = step_weights(q_tile, k_tile, steps, tau, D, PRECISION, ACC)
            z = add_dot(z, m, g_blocks, PRECISION)
            o_tile = output(z, q_tile, gamma, lam, eps, D, WIDTH)
            store_tile(o + o_start, o_step, n, T, o_tile, D, SIZE)
            if mini_batch_chunks(SIZE) > 1:
                a, a_c = add_outer(a, a_c, split_features(eg, D), k_tile, D, PRECISION)
            else:
                s, c = add_outer(s, c, split_features(eg, D), k_tile, D, PRECISION)
        if mini_batch_chunks(SIZE) > 1:
            s, c = s + tau_last * a, c + tau_last * a_c
