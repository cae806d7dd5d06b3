"""Forward kernels of TTT-linear (App. A): the fused scan, or a lean scan and a parallel output."""

import triton
import triton.language as tl

from ._tiles import (
    CHUNK,
    VARYING,
    add_product,
    blocks,
    centred,
    dense_start,
    load_rows,
    load_state,
    load_tile,
    normalized,
    operand,
    output_mean,
    projected,
    scan_start,
    store_state,
    store_tile,
    token_scales,
    tokens,
    walk,
)


@triton.jit
def inner_gradient(z, k, v, gamma, lam, eps, D: tl.constexpr):
    """G = Π(γ⊙(γX + λ − (V − K))) of a chunk, `(16, D)`, from Z = KW + c."""
    x, rstd = normalized(z, eps, D)
    # In this order V and K come into the tensor cores' layout in their own dtype, not in fp32.
    y = (gamma[None, :] * x + lam[None, :]) - v.to(z.dtype) + k.to(z.dtype)
    return operand(projected(gamma[None, :] * y, x, rstd, D), k)


@triton.jit
def mixing(k, q, steps, tau, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """−Mᵀ `(16 s, 16 t)`, M = tril(E⊙(QKᵀ + 1)): what each step of a mini-batch does to Z̄."""
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC)
    causal = tl.arange(0, CHUNK)[:, None] <= tl.arange(0, CHUNK)[None, :]
    return operand(tl.where(causal, -steps[:, None] * tau[None, :] * (scores + 1), 0), q)


@triton.jit
def output(z, q, gamma, lam, eps, D: tl.constexpr):
    """O = Q + γ⊙LN̂(Z̄) + λ, `(16, D)`."""
    x, _ = normalized(z, eps, D)
    return q.to(z.dtype) + gamma[None, :] * x + lam[None, :]


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
    w_final,  # (B·R·H, D, D)
    c_final,
    w_segment,  # (B·R·H, segments, D, D)
    c_segment,
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
    QUERY: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program runs one scan: with its output, or with the state before each segment."""
    scan = tl.program_id(0)
    ACC: tl.constexpr = w_final.dtype.element_ty
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    v_start, v_step = scan_start(scan, T, R, H, reverse_mask, v_b, v_t, v_r, v_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    o_start, o_step = dense_start(scan, T, R, H, reverse_mask, D)
    k += k_start
    v += v_start
    eta += e_start
    o += o_start
    g += o_start
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    gamma = tl.load(ln_weight + head * D + tl.arange(0, D))
    lam = tl.load(ln_bias + head * D + tl.arange(0, D))
    s, c = load_state(w0 + head * D * D, b0 + head * D, D)
    s, c = centred(s, c, D)
    chunks = tl.cdiv(T, CHUNK)
    # The tokens of the next chunk are on their way while this one is computed.
    k_next = load_tile(k, k_step, 0, T, D)
    v_next = load_tile(v, v_step, 0, T, D)
    e_next = load_rows(eta, e_step, 0, T)
    if QUERY:
        q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_b, q_t, q_r, q_h)
        q += q_start
        q_next = load_tile(q, q_step, 0, T, D)
    for n in tl.range(chunks, num_stages=1):
        if not QUERY:  # noqa: SIM102, known when compiling, unlike the next condition
            if n % segment == 0:
                slot = tl.cast(scan, tl.int64) * tl.cdiv(chunks, segment) + n // segment
                store_state(w_segment + slot * D * D, c_segment + slot * D, s, c, D)
        k_tile, v_tile, steps = k_next, v_next, e_next
        k_next = load_tile(k, k_step, n + 1, T, D)
        v_next = load_tile(v, v_step, n + 1, T, D)
        e_next = load_rows(eta, e_step, n + 1, T)
        state = s.to(k_tile.dtype)
        z = add_product(c, state, tl.trans(k_tile), PRECISION)
        if QUERY:
            q_tile = q_next
            q_next = load_tile(q, q_step, n + 1, T, D)
            zq = add_product(c, state, tl.trans(q_tile), PRECISION)
        g_tile = inner_gradient(tokens(z, D), k_tile, v_tile, gamma, lam, eps, D)
        store_tile(g, o_step, n, T, g_tile, D)
        s, c = walk(s, c, g_tile, k_tile, -tau_last * steps, D, PRECISION)
        if QUERY:
            m = mixing(k_tile, q_tile, steps, tau, PRECISION, ACC)
            zq = tokens(add_product(zq, blocks(g_tile, D), m, PRECISION), D)
            store_tile(o, o_step, n, T, output(zq, q_tile, gamma, lam, eps, D), D)
    # Back comes the mean that `centred` took away.
    s0, c0 = load_state(w0 + head * D * D, b0 + head * D, D)
    s += output_mean(s0, D)
    c += output_mean(c0, D)
    slot = tl.cast(scan, tl.int64)
    store_state(w_final + slot * D * D, c_final + slot * D, s, c, D)


@triton.jit(do_not_specialize=VARYING)
def forward_output(
    q,  # (B, T, R, H, D), any strides but the last
    k,
    eta,  # (B, T, R, H), any strides
    ln_weight,  # (R, H, D)
    ln_bias,
    token_scale,  # (R, 16)
    g,  # (B, T, R, H, D)
    o,
    w_segment,  # (B·R·H, segments, D, D)
    c_segment,
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
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program writes the output of one segment of a scan, from the state before it and G."""
    chunks = tl.cdiv(T, CHUNK)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    i_s = tl.program_id(0) % segments
    ACC: tl.constexpr = w_segment.dtype.element_ty
    q_start, q_step = scan_start(scan, T, R, H, reverse_mask, q_b, q_t, q_r, q_h)
    k_start, k_step = scan_start(scan, T, R, H, reverse_mask, k_b, k_t, k_r, k_h)
    e_start, e_step = scan_start(scan, T, R, H, reverse_mask, eta_b, eta_t, eta_r, eta_h)
    o_start, o_step = dense_start(scan, T, R, H, reverse_mask, D)
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, HAS_SCALE, ACC)
    gamma = tl.load(ln_weight + head * D + tl.arange(0, D))
    lam = tl.load(ln_bias + head * D + tl.arange(0, D))
    slot = tl.cast(tl.program_id(0), tl.int64)
    s, c = load_state(w_segment + slot * D * D, c_segment + slot * D, D)
    for n in range(i_s * segment, tl.minimum(i_s * segment + segment, chunks)):
        k_tile = load_tile(k + k_start, k_step, n, T, D)
        q_tile = load_tile(q + q_start, q_step, n, T, D)
        g_tile = load_tile(g + o_start, o_step, n, T, D)
        steps = load_rows(eta + e_start, e_step, n, T)
        m = mixing(k_tile, q_tile, steps, tau, PRECISION, ACC)
        state = s.to(q_tile.dtype)
        z = add_product(c, state, tl.trans(q_tile), PRECISION)
        z = tokens(add_product(z, blocks(g_tile, D), m, PRECISION), D)
        store_tile(o + o_start, o_step, n, T, output(z, q_tile, gamma, lam, eps, D), D)
        s, c = walk(s, c, g_tile, k_tile, -tau_last * steps, D, PRECISION)
