"""Backward kernels of TTT-linear (App. A; README.md): states, query side, key side.

With the saved G the state can be walked in either direction. What the tokens ask of it needs no
gradient of the state, so it runs in parallel over segments of a scan, and forward: LayerNorm
divides by what it finds there, and of the rounding that a walk back leaves in a small state it
would make errors of any size. What the keys made of the state runs from the last mini-batch to the
first, with the gradient of the state in hand.
"""

import triton
import triton.language as tl

from ._tiles import (
    CHUNK,
    VARYING,
    add_product,
    blocks,
    centred,
    dense_start,
    in_place,
    load_rows,
    load_state,
    load_tile,
    normalized,
    operand,
    output_mean,
    product,
    projected,
    row_pointers,
    scan_start,
    state_offsets,
    store_state,
    store_tile,
    token_scales,
    tokens,
    turned,
    update,
    walk,
)


@triton.jit
def fold(x, D: tl.constexpr):
    """Sums of a `(16, D)` over what one thread of a tensor-core tile holds: `(4, D)`.

    A running sum over tokens then costs a quarter of the registers and no exchange.
    """
    return tl.sum(tl.sum(tl.reshape(x, (2, 4, 2, D)), axis=2), axis=0)


@triton.jit(do_not_specialize=VARYING)
def backward_states(
    k,  # (B, T, R, H, D), any strides but the last
    eta,  # (B, T, R, H), any strides
    w0,  # (R, H, D, D), contiguous like all that follow
    b0,
    token_scale,  # (R, 16)
    g,  # (B, T, R, H, D)
    w_segment,  # (B·R·H, segments, D, D)
    c_segment,
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
    D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one scan and writes the state before every segment."""
    scan = tl.program_id(0)
    ACC: tl.constexpr = w_segment.dtype.element_ty
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    g_start, g_step = dense_start(scan, T, R, H, reverse_mask, D)
    k += k_start
    eta += e_start
    g += g_start
    head = scan % (R * H)
    _, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    s, c = load_state(w0 + head * D * D, b0 + head * D, D)
    s, c = centred(s, c, D)
    chunks = tl.cdiv(T, CHUNK)
    slot = tl.cast(scan, tl.int64) * tl.cdiv(chunks, segment)
    k_next = load_tile(k, k_step, 0, T, D)
    g_next = load_tile(g, g_step, 0, T, D)
    e_next = load_rows(eta, e_step, 0, T)
    for n in tl.range(chunks, num_stages=1):
        if n % segment == 0:
            here = slot + n // segment
            store_state(w_segment + here * D * D, c_segment + here * D, s, c, D)
        k_tile, g_tile, steps = k_next, g_next, e_next
        k_next = load_tile(k, k_step, n + 1, T, D)
        g_next = load_tile(g, g_step, n + 1, T, D)
        e_next = load_rows(eta, e_step, n + 1, T)
        s, c = walk(s, c, g_tile, k_tile, -tau_last * steps, D, PRECISION)


@triton.jit(do_not_specialize=VARYING)
def backward_query(
    do,  # (B, T, R, H, D), contiguous
    q,  # (B, T, R, H, D), any strides but the last
    k,
    eta,  # (B, T, R, H), any strides
    ln_weight,  # (R, H, D), contiguous like all that follow
    token_scale,  # (R, 16)
    g,  # (B, T, R, H, D)
    w_segment,  # (starts, D, D): before every segment, or before every scan of a head
    c_segment,
    d_out,  # (B, T, R, H, D): D = Π(γ⊙dO)
    normed,  # (B, T, R, H, D): X = LN̂(Z)
    rstd,  # (B, T, R, H): 1/σ of Z
    dq,
    deta,  # (B, T, R, H)
    dln_weight,  # (B·R·H, segments, D)
    dln_bias,
    dtoken_scale,  # (B·R·H, segments, 16)
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
    starts,
    eps,
    D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one segment of a scan: X, D, dQ, and what E gets through M."""
    chunks = tl.cdiv(T, CHUNK)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    i_s = tl.program_id(0) % segments
    ACC: tl.constexpr = w_segment.dtype.element_ty
    q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_b, q_t, q_r, q_h)
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    g_start, g_step = dense_start(scan, T, R, H, reverse_mask, D)
    de_start, de_step = dense_start(scan, T, R, H, reverse_mask, 1)
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    gamma = tl.load(ln_weight + head * D + tl.arange(0, D))
    slot = tl.cast(tl.program_id(0), tl.int64)
    start = slot % starts
    s, c = load_state(w_segment + start * D * D, c_segment + start * D, D)
    s, c = centred(s, c, D)
    causal = tl.arange(0, CHUNK)[:, None] <= tl.arange(0, CHUNK)[None, :]
    dgamma = tl.zeros((4, D), ACC)
    dlam = tl.zeros((4, D), ACC)
    dtau = tl.zeros((CHUNK,), ACC)
    first = i_s * segment
    for n in range(first, tl.minimum(first + segment, chunks)):
        k_tile = load_tile(k + k_start, k_step, n, T, D)
        g_tile = load_tile(g + g_start, g_step, n, T, D)
        q_tile = load_tile(q + q_start, q_step, n, T, D)
        do_tile = load_tile(do + g_start, g_step, n, T, D)
        steps = load_rows(eta + e_start, e_step, n, T)
        state = s.to(k_tile.dtype)
        inside = n * CHUNK + tl.arange(0, CHUNK) < T
        z = add_product(c, state, tl.trans(k_tile), PRECISION)
        x, rstd_k = normalized(tokens(z, D), eps, D)
        store_tile(normed + g_start, g_step, n, T, x, D)
        tl.store(row_pointers(rstd + de_start, de_step, n), rstd_k, mask=inside)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION, out_dtype=ACC) + 1
        e = tl.where(causal, steps[:, None] * tau[None, :], 0)
        z = add_product(c, state, tl.trans(q_tile), PRECISION)
        z = add_product(z, blocks(g_tile, D), operand(-e * scores, k_tile), PRECISION)
        x, rstd_q = normalized(tokens(z, D), eps, D)
        grad = in_place(do_tile, 1.0, D, PRECISION, ACC)
        dlam += fold(grad, D)
        dgamma += fold(grad * x, D)
        d = projected(gamma[None, :] * grad, x, rstd_q, D).to(k_tile.dtype)
        store_tile(d_out + g_start, g_step, n, T, d, D)
        gd = tl.dot(g_tile, tl.trans(d), input_precision=PRECISION, out_dtype=ACC)
        de = tl.where(causal, -gd * scores, 0)
        dtau += tl.sum(de * steps[:, None], axis=0)
        dsteps = tl.sum(de * tau[None, :], axis=1)
        tl.store(row_pointers(deta + de_start, de_step, n), dsteps, mask=inside)
        es = (-e * gd).to(k_tile.dtype)
        dq_tile = product(turned(state, D), tl.trans(d), PRECISION, ACC)
        dq_tile = add_product(dq_tile, blocks(k_tile, D), es, PRECISION)
        store_tile(dq + g_start, g_step, n, T, grad + tokens(dq_tile, D), D)
        s, c = walk(s, c, g_tile, k_tile, -tau_last * steps, D, PRECISION)
    tl.store(dln_weight + slot * D + tl.arange(0, D), tl.sum(dgamma, axis=0))
    tl.store(dln_bias + slot * D + tl.arange(0, D), tl.sum(dlam, axis=0))
    tl.store(dtoken_scale + slot * CHUNK + tl.arange(0, CHUNK), dtau)


@triton.jit(do_not_specialize=VARYING)
def backward_key(
    q,  # (B, T, R, H, D), any strides but the last
    k,
    v,
    eta,  # (B, T, R, H), any strides
    ln_weight,  # (R, H, D), contiguous like all that follow
    ln_bias,
    token_scale,  # (R, 16)
    g,  # (B, T, R, H, D)
    d_out,
    normed,
    rstd,  # (B, T, R, H)
    w_final,  # (B·R·H, D, D)
    dk,  # (B, T, R, H, D)
    dv,
    deta,  # (B, T, R, H), with the query side's part
    dw0,  # (B·R·H, D, D)
    db0,
    dln_weight,  # (B·R·H, D)
    dln_bias,
    dtau_last,  # (B·R·H,)
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
    D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program walks one scan back with the gradient of its state: dK, dV and what is left."""
    scan = tl.program_id(0)
    ACC: tl.constexpr = w_final.dtype.element_ty
    q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_b, q_t, q_r, q_h)
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    v_start, v_step = scan_start(scan, T, R, H, reverse_mask, v_b, v_t, v_r, v_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    g_start, g_step = dense_start(scan, T, R, H, reverse_mask, D)
    de_start, de_step = dense_start(scan, T, R, H, reverse_mask, 1)
    q += q_start
    k += k_start
    v += v_start
    eta += e_start
    g += g_start
    d_out += g_start
    normed += g_start
    rstd += de_start
    dk += g_start
    dv += g_start
    deta += de_start
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    gamma = tl.load(ln_weight + head * D + tl.arange(0, D))
    lam = tl.load(ln_bias + head * D + tl.arange(0, D))
    slot = tl.cast(scan, tl.int64)
    s = tl.load(w_final + slot * D * D + state_offsets(D))
    s -= output_mean(s, D)
    ds = tl.zeros((D // CHUNK, CHUNK, D), ACC)
    dc = tl.zeros((D // CHUNK, CHUNK, CHUNK), ACC)
    dgamma = tl.zeros((4, D), ACC)
    dlam = tl.zeros((4, D), ACC)
    dlast = tl.zeros((CHUNK,), ACC)
    causal = tl.arange(0, CHUNK)[:, None] >= tl.arange(0, CHUNK)[None, :]
    chunks = tl.cdiv(T, CHUNK)
    # The tokens of the next chunk are on their way while this one is computed.
    k_next = load_tile(k, k_step, chunks - 1, T, D)
    g_next = load_tile(g, g_step, chunks - 1, T, D)
    q_next = load_tile(q, q_step, chunks - 1, T, D)
    d_next = load_tile(d_out, g_step, chunks - 1, T, D)
    v_next = load_tile(v, v_step, chunks - 1, T, D)
    for i in tl.range(chunks, num_stages=1):
        n = chunks - 1 - i
        before = tl.maximum(n - 1, 0)
        k_tile, g_tile, q_tile, d_tile, v_tile = k_next, g_next, q_next, d_next, v_next
        steps = load_rows(eta, e_step, n, T)
        k_next = load_tile(k, k_step, before, T, D)
        g_next = load_tile(g, g_step, before, T, D)
        q_next = load_tile(q, q_step, before, T, D)
        d_next = load_tile(d_out, g_step, before, T, D)
        v_next = load_tile(v, v_step, before, T, D)
        last = tau_last * steps
        ones = tl.full((CHUNK, CHUNK), 1.0, k_tile.dtype)

        # From the gradient of the state after this mini-batch: H = K dW' + dc' and -e⊙R.
        dstate = ds.to(k_tile.dtype)
        h = add_product(dc, dstate, tl.trans(k_tile), PRECISION)
        eg = operand(g_tile.to(ACC) * -last[:, None], k_tile)
        dk_tile = product(turned(dstate, D), tl.trans(eg), PRECISION, ACC)

        # From the outputs of this mini-batch: through M to U, through E⊙S to K, and to the state.
        e = tl.where(causal, tau[:, None] * steps[None, :], 0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=ACC) + 1
        d_blocks = blocks(d_tile, D)
        m = operand(e * scores, k_tile)
        u = -tokens(add_product(h * last[None, None, :], d_blocks, m, PRECISION), D)
        es = tl.dot(d_tile, tl.trans(g_tile), input_precision=PRECISION, out_dtype=ACC)
        es = (-e * es).to(k_tile.dtype)
        dk_tile = add_product(dk_tile, blocks(q_tile, D), es, PRECISION)
        ds = add_product(ds, d_blocks, q_tile, PRECISION)
        dc = add_product(dc, d_blocks, ones, PRECISION)

        # Through the inner model: LN̂ of Z, the loss's own LayerNorm, and Z to K and the state.
        s = add_product(s, update(g_tile, k_tile, last, ACC, D), k_tile, PRECISION)
        state = s.to(k_tile.dtype)
        x = in_place(load_tile(normed, g_step, n, T, D), 1.0, D, PRECISION, ACC)
        rstd_k = load_rows(rstd, de_step, n, T)
        y = gamma[None, :] * x + lam[None, :] + in_place(k_tile, 1.0, D, PRECISION, ACC)
        y += in_place(v_tile, -1.0, D, PRECISION, ACC)
        grad = in_place(g_tile, 1.0, D, PRECISION, ACC)
        dsteps = -tl.sum(tokens(h, D) * grad, axis=1)
        mean_ux = tl.sum(u * x, axis=1) / D
        mean_ug = tl.sum(u * grad, axis=1) / D
        mean_px = tl.sum(gamma[None, :] * y * x, axis=1) / D
        dp = projected(u, x, rstd_k, D)
        dy = gamma[None, :] * dp
        store_tile(dv, g_step, n, T, -dy, D)
        dgamma += fold(dp * y + dy * x, D)
        dlam += fold(dy, D)
        rest = mean_px[:, None] * dp + mean_ux[:, None] * grad + mean_ug[:, None] * x
        dz = projected(gamma[None, :] * dy, x, rstd_k, D) - rstd_k[:, None] * rest
        dz = dz.to(k_tile.dtype)
        dz_blocks = blocks(dz, D)
        ds = add_product(ds, dz_blocks, k_tile, PRECISION)
        dc = add_product(dc, dz_blocks, ones, PRECISION)
        dk_tile = add_product(dk_tile, turned(state, D), tl.trans(dz), PRECISION)
        store_tile(dk, g_step, n, T, tokens(dk_tile, D) + dy, D)
        dlast += steps * dsteps
        pointers = row_pointers(deta, de_step, n)
        inside = n * CHUNK + tl.arange(0, CHUNK) < T
        tl.store(pointers, tl.load(pointers, mask=inside) + tau_last * dsteps, mask=inside)
    store_state(dw0 + slot * D * D, db0 + slot * D, ds, dc, D)
    tl.store(dln_weight + slot * D + tl.arange(0, D), tl.sum(dgamma, axis=0))
    tl.store(dln_bias + slot * D + tl.arange(0, D), tl.sum(dlam, axis=0))
    tl.store(dtau_last + slot, tl.sum(dlast, axis=0))
