"""Backward kernels of TTT-linear (App. A; README.md): query side, chain, key side.

The query side does not need the state's gradient: it runs in parallel over the segments of a scan,
forward from the state that the forward pass saved before each. It must run forward because
LayerNorm divides by σ, and would turn the rounding of a state recomputed backward into errors of
any size. Only the gradient of the state is a chain, from the last mini-batch to the first, and the
chain computes nothing else. The key side that follows is parallel again.
"""

import triton
import triton.language as tl

from .._triton import add_dot, dot
from ._tiles import (
    CHUNK,
    ROW_DETA,
    ROW_DLAST,
    ROW_MEAN_PX,
    ROW_RSTD,
    TILE_D,
    TILE_DP,
    TILE_DZ,
    TILE_G,
    TILE_SLOPE,
    TILE_U,
    TILE_X,
    VARYING,
    add_outer,
    apply_state,
    column,
    concat_features,
    dense_scan_of,
    descent_step,
    feature_offsets,
    from_scratch,
    load_features,
    load_rows,
    load_state,
    load_state_before,
    load_tile,
    parts_of,
    repeat_blocks,
    row_pointers,
    saturating_cast,
    scan_of,
    scores,
    scratch_of,
    scratch_rows,
    scratch_tile,
    split_features,
    split_inputs,
    state_offsets,
    store_state,
    store_tile,
    subtract_mean,
    sum_features2,
    sum_features3,
    sum_features4,
    to_scratch,
    token_mask,
    token_scales,
    transpose,
)


@triton.jit
def inner_model(z, k, v, gamma, lam, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """X, 1/σ, ∂P/∂γ, mean(P⊙X) and G of a chunk, `(16, D)` and `(16,)`, from the saved Z.

    A row of a tile as it is loaded is in one warp: these sums over features need no exchange.
    """
    z -= (tl.sum(z, axis=1) / WIDTH)[:, None]
    if WIDTH != D:
        z = tl.where(tl.arange(0, D)[None, :] < WIDTH, z, 0)
    rstd = tl.rsqrt(tl.sum(z * z, axis=1) / WIDTH + eps)
    x = z * rstd[:, None]
    y = gamma * x + lam + (k.to(z.dtype) - v.to(z.dtype))
    p = gamma * y
    mean_p, mean_px = tl.sum(p, axis=1) / WIDTH, tl.sum(p * x, axis=1) / WIDTH
    p -= mean_p[:, None]
    if WIDTH != D:
        p = tl.where(tl.arange(0, D)[None, :] < WIDTH, p, 0)
    return x, rstd, y + gamma * x, mean_px, (p - x * mean_px[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=VARYING)
def backward_query(
    tokens,  # q, k, v (B, T, R, H, D), features dense; eta (B, T, R, H), contiguous like the rest
    strides,  # of q, k, v
    parameters,  # w0 (R, H, D, D); b0, ln_weight, ln_bias (R, H, D); token_scale (R, b)
    kept,  # Z (B, T, R, H, D); W (B, R, H, segments, D, D) and c (B, R, H, segments, D)
    scratch,  # writes tiles D, U, X, G, ∂P/∂γ and rows 1/σ, mean(P⊙X), deta (`scratch_tile`)
    parts,  # writes W as G gives it, dln_weight, dln_bias and dtoken_scale (`parts_of`)
    do,  # (B, T, R, H, D)
    dq,  # (B, T, R, H, D)
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
    """One program runs one segment: X, G, D, dQ, and the gradients of G and E through M."""
    q, k, v, eta = tokens
    w0, b0, ln_weight, ln_bias, token_scale = parameters
    z_kept, w_kept, c_kept = kept
    chunks = tl.cdiv(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    part = tl.program_id(0) % segments
    ACC: tl.constexpr = w0.dtype.element_ty
    q, q_step = scan_of(q, strides[0], scan, T, R, H, reverse_mask)
    k, k_step = scan_of(k, strides[1], scan, T, R, H, reverse_mask)
    v, v_step = scan_of(v, strides[2], scan, T, R, H, reverse_mask)
    eta, eta_step = dense_scan_of(eta, 1, scan, T, R, H, reverse_mask)
    dense, dense_step = dense_scan_of(0, D, scan, T, R, H, reverse_mask)
    z_kept += dense
    do += dense
    tiles, rows = scratch_of(scratch, scan, chunks, D)
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    gamma_row = tl.load(ln_weight + head * D + tl.arange(0, D))[None, :]
    lam_row = tl.load(ln_bias + head * D + tl.arange(0, D))[None, :]
    s, c = load_state_before(part, w0, b0, w_kept, c_kept, scan, head, segments, D, WIDTH)
    causal = tl.arange(0, CHUNK)[None, :, None] >= tl.arange(0, CHUNK)[None, None, :]
    block = tl.arange(0, D // CHUNK)[:, None]
    dgamma = tl.zeros((D // CHUNK, CHUNK // 2, CHUNK), ACC)
    dlam = tl.zeros((CHUNK, D), ACC)
    dtau = tl.zeros((D // CHUNK, CHUNK), ACC)
    first = part * segment
    last = tl.minimum(first + segment, chunks)
    # Prefetches the tokens of the next chunk, except V and dO: a chunk needs them late and has no
    # registers to hold them twice.
    k_next = load_tile(k, k_step, first, T, D, SIZE)
    q_next = load_tile(q, q_step, first, T, D, SIZE)
    z_next = load_tile(z_kept, dense_step, first, T, D, SIZE)
    steps_next = load_rows(eta, eta_step, first, T, SIZE)
    for n in tl.range(first, last, num_stages=1):
        k_tile, q_tile, z_tile, steps = k_next, q_next, z_next, steps_next
        v_tile = load_tile(v, v_step, n, T, D, SIZE)
        do_tile = load_tile(do, dense_step, n, T, D, SIZE)
        k_next = load_tile(k, k_step, n + 1, T, D, SIZE)
        q_next = load_tile(q, q_step, n + 1, T, D, SIZE)
        z_next = load_tile(z_kept, dense_step, n + 1, T, D, SIZE)
        steps_next = load_rows(eta, eta_step, n + 1, T, SIZE)

        zq = apply_state(s, c, q_tile, D, PRECISION)
        s_now = split_inputs(s.to(k_tile.dtype), D)

        # The keys' side, as in the forward pass.
        x, rstd_k, slope, mean_px, g = inner_model(
            z_tile.to(ACC), k_tile, v_tile, gamma_row, lam_row, eps, D, WIDTH
        )
        g_tile, x_tile = saturating_cast(g, k_tile), x.to(k_tile.dtype)
        slope_tile = saturating_cast(slope, k_tile)
        tl.store(scratch_tile(tiles, n, TILE_G, D), tl.reshape(g_tile, (CHUNK * D,)))
        tl.store(scratch_tile(tiles, n, TILE_X, D), tl.reshape(x_tile, (CHUNK * D,)))
        tl.store(scratch_tile(tiles, n, TILE_SLOPE, D), tl.reshape(slope_tile, (CHUNK * D,)))
        tl.store(scratch_rows(rows, n, ROW_RSTD), rstd_k)
        tl.store(scratch_rows(rows, n, ROW_MEAN_PX), mean_px)
        # Updates the state right after reading it: the keys are operands of both, and their
        # registers are free afterwards.
        eg = descent_step(g_tile, (tau_last * steps)[:, None])
        s, c = add_outer(s, c, split_features(eg, D), k_tile, D, PRECISION)
        e = tl.where(causal, tau[None, :, None] * steps[None, None, :], 0)
        qk = scores(q_tile, k_tile, D, PRECISION, ACC) + 1
        m = saturating_cast(-e * qk, k_tile)
        zq = add_dot(zq, m, split_features(g_tile, D), PRECISION)

        # The gradient of Z̄. Its sums share an exchange: Σ(u⊙LN̂(Z̄)) is Σ(u⊙Z̄)/σ.
        dlam += do_tile.to(ACC)
        grad = split_features(do_tile, D).to(ACC)
        u = gamma * grad
        square, sum_u, sum_uz = sum_features3(zq * zq, u, u * zq)
        rstd_q = tl.rsqrt(square / WIDTH + eps)
        xq, sum_ux = zq * column(rstd_q), sum_uz * rstd_q
        # Over the two tokens that a thread holds: half the registers for dγ, and no exchange.
        dgamma += tl.sum(tl.reshape(grad * xq, (D // CHUNK, 2, CHUNK // 2, CHUNK)), axis=1)
        u = subtract_mean(u, column(sum_u / WIDTH), D, WIDTH)
        d = ((u - xq * column(sum_ux / WIDTH)) * column(rstd_q)).to(k_tile.dtype)
        d_tile = concat_features(d, D)
        tl.store(scratch_tile(tiles, n, TILE_D, D), to_scratch(d, D))

        # Through M to G, E and the queries.
        u = dot(transpose(m), d, ACC, PRECISION)
        tl.store(scratch_tile(tiles, n, TILE_U, D), to_scratch(u.to(k_tile.dtype), D))
        dg = scores(d_tile, g_tile, D, PRECISION, ACC)
        de = tl.where(causal, -dg * qk, 0)
        # Every block has the same E.
        dtau += tl.sum(de * steps[None, None, :], axis=2)
        places = scratch_rows(rows, n, ROW_DETA)[None, :] + block * 0
        tl.store(places, tl.sum(de * tau[None, :, None], axis=1), mask=block == 0)
        es = (-e * dg).to(k_tile.dtype)
        dq_tile = dot(repeat_blocks(d_tile, D), s_now, ACC, PRECISION)
        dq_tile = add_dot(dq_tile, es, split_features(k_tile, D), PRECISION)
        store_tile(dq + dense, dense_step, n, T, concat_features(dq_tile + grad, D), D, SIZE)
    slot = tl.cast(tl.program_id(0), tl.int64)
    slots = tl.cast(tl.num_programs(0), tl.int64)
    dnorm, dtoken_scale, states, _ = parts_of(parts, slots, D)
    tl.store(states + slot * 2 * D * D + state_offsets(D), s)
    dnorm += slot * D
    tl.store(dnorm + feature_offsets(D), tl.sum(dgamma, axis=1))
    tl.store(dnorm + slots * 2 * D + tl.arange(0, D), tl.sum(dlam, axis=0))
    place = tl.arange(0, CHUNK)[None, :] + block * 0
    tl.store(dtoken_scale + slot * SIZE + place, dtau, mask=(block == 0) & (place < SIZE))


@triton.jit(do_not_specialize=VARYING)
def backward_chain(
    tokens,  # q, k (B, T, R, H, D), features dense; eta (B, T, R, H), contiguous like the rest
    strides,  # of q, k
    ln_weight,  # (R, H, D)
    token_scale,  # (R, b)
    scratch,  # reads tiles D, U, X, G, rows 1/σ, mean(P⊙X); writes tiles dP, dZ, row dlast
    parts,  # writes the gradient of W after each segment, dw0 and db0
    T,
    R,
    H,
    reverse_mask,
    segment,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program runs one scan backward with the gradient of its state: dP and dZ."""
    scan = tl.program_id(0)
    q, k, eta = tokens
    ACC: tl.constexpr = parts.dtype.element_ty
    q, q_step = scan_of(q, strides[0], scan, T, R, H, reverse_mask)
    k, k_step = scan_of(k, strides[1], scan, T, R, H, reverse_mask)
    eta, eta_step = dense_scan_of(eta, 1, scan, T, R, H, reverse_mask)
    head = scan % (R * H)
    _, tau_last = token_scales(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    gamma = load_features(ln_weight + head * D, D)
    ds = tl.zeros((D // CHUNK, CHUNK, D), ACC)
    dc = tl.zeros((D // CHUNK, CHUNK, CHUNK), ACC)
    chunks = tl.cdiv(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    _, _, states, _ = parts_of(parts, tl.num_programs(0) * segments, D)
    states += tl.cast(scan, tl.int64) * segments * 2 * D * D
    tiles, rows = scratch_of(scratch, scan, chunks, D)
    # The tokens of the next chunk are on their way while this one is computed.
    k_next = load_tile(k, k_step, chunks - 1, T, D, SIZE)
    q_next = load_tile(q, q_step, chunks - 1, T, D, SIZE)
    x_next = tl.reshape(tl.load(scratch_tile(tiles, chunks - 1, TILE_X, D)), (CHUNK, D))
    d_next = tl.load(scratch_tile(tiles, chunks - 1, TILE_D, D))
    g_next = tl.reshape(tl.load(scratch_tile(tiles, chunks - 1, TILE_G, D)), (CHUNK, D))
    steps_next = load_rows(eta, eta_step, chunks - 1, T, SIZE)
    rstd_next = tl.load(scratch_rows(rows, chunks - 1, ROW_RSTD))
    mean_px_next = tl.load(scratch_rows(rows, chunks - 1, ROW_MEAN_PX))
    # Two loops, so that storing a state takes no registers from the chunks between.
    for j in range(segments):
        part = segments - 1 - j
        first = part * segment
        last = tl.minimum(first + segment, chunks) - 1
        tl.store(states + (part * 2 + 1) * D * D + state_offsets(D), ds)
        for n in tl.range(last, first - 1, -1, num_stages=1):
            before = tl.maximum(n - 1, 0)
            k_tile, q_tile, g_tile, d_tile, x_tile = k_next, q_next, g_next, d_next, x_next
            d_tile = from_scratch(d_tile, D)
            # Loaded late: prefetching would only take registers.
            u_tile = from_scratch(tl.load(scratch_tile(tiles, n, TILE_U, D)), D)
            steps, rstd_k, mean_px = steps_next, rstd_next, mean_px_next
            k_next = load_tile(k, k_step, before, T, D, SIZE)
            q_next = load_tile(q, q_step, before, T, D, SIZE)
            x_next = tl.reshape(tl.load(scratch_tile(tiles, before, TILE_X, D)), (CHUNK, D))
            d_next = tl.load(scratch_tile(tiles, before, TILE_D, D))
            g_next = tl.reshape(tl.load(scratch_tile(tiles, before, TILE_G, D)), (CHUNK, D))
            steps_next = load_rows(eta, eta_step, before, T, SIZE)
            rstd_next = tl.load(scratch_rows(rows, before, ROW_RSTD))
            mean_px_next = tl.load(scratch_rows(rows, before, ROW_MEAN_PX))

            grad = split_features(g_tile, D).to(ACC)

            # U = −MᵀD − e⊙H with H = K dW' + dc'.
            h = apply_state(ds, dc, k_tile, D, PRECISION)
            ds, dc = add_outer(ds, dc, d_tile, q_tile, D, PRECISION)
            x = split_features(x_tile, D).to(ACC)
            u = u_tile.to(ACC) - h * column(tau_last * steps)
            mean_u, mean_ux, mean_ug, sum_hg = sum_features4(u, u * x, u * grad, h * grad)
            mean_u, mean_ux, mean_ug = mean_u / WIDTH, mean_ux / WIDTH, mean_ug / WIDTH
            # D and H have no mean but rounding errors, which grow as in `inner_gradient`.
            # X and G have none that matters to the other two sums.
            u = subtract_mean(u, column(mean_u), D, WIDTH)
            tl.store(scratch_rows(rows, n, ROW_DLAST), -sum_hg)

            # Through the inner model: LN̂ of Z, the inner loss's LayerNorm, and Z to the state.
            dp = (u - x * column(mean_ux)) * column(rstd_k)
            du = gamma * gamma * dp
            mean_du, mean_dux = sum_features2(du, du * x)
            dz = subtract_mean(du, column(mean_du / WIDTH), D, WIDTH)
            dz -= x * column(mean_dux / WIDTH + mean_ug)
            dz -= dp * column(mean_px) + grad * column(mean_ux)
            dz = (dz * column(rstd_k)).to(k_tile.dtype)
            ds, dc = add_outer(ds, dc, dz, k_tile, D, PRECISION)
            tl.store(scratch_tile(tiles, n, TILE_DZ, D), to_scratch(dz, D))
            tl.store(scratch_tile(tiles, n, TILE_DP, D), to_scratch(dp.to(k_tile.dtype), D))
    _, _, _, dw0 = parts_of(parts, tl.num_programs(0) * segments, D)
    dw0 += tl.cast(scan, tl.int64) * (D + 1) * D
    store_state(dw0, dw0 + D * D, ds, dc, D)


@triton.jit(do_not_specialize=VARYING)
def backward_key(
    tokens,  # q, k (B, T, R, H, D), features dense; eta (B, T, R, H), contiguous like the rest
    strides,  # of q, k
    ln_weight,  # (R, H, D)
    token_scale,  # (R, b)
    scratch,  # reads tiles D, G, ∂P/∂γ, dP, dZ and rows deta, dlast
    parts,  # reads W and its gradient after each segment; writes dln_weight, dln_bias, τ_b's part
    dtokens,  # dk, dv (B, T, R, H, D) and deta (B, T, R, H)
    T,
    R,
    H,
    reverse_mask,
    segment,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program runs one segment backward with the state and its gradient: dK, dV, the rest."""
    q, k, eta = tokens
    dk, dv, deta = dtokens
    chunks = tl.cdiv(T, SIZE)
    segments = tl.cdiv(chunks, segment)
    scan = tl.program_id(0) // segments
    part = tl.program_id(0) % segments
    ACC: tl.constexpr = parts.dtype.element_ty
    q, q_step = scan_of(q, strides[0], scan, T, R, H, reverse_mask)
    k, k_step = scan_of(k, strides[1], scan, T, R, H, reverse_mask)
    eta, eta_step = dense_scan_of(eta, 1, scan, T, R, H, reverse_mask)
    dense, dense_step = dense_scan_of(0, D, scan, T, R, H, reverse_mask)
    deta, _ = dense_scan_of(deta, 1, scan, T, R, H, reverse_mask)
    tiles, rows = scratch_of(scratch, scan, chunks, D)
    head = scan % (R * H)
    tau, tau_last = token_scales(token_scale, head // H, SIZE, HAS_SCALE, ACC)
    # Nothing is summed over features here: tensors that are not multiplied keep the layout of
    # loads.
    gamma = tl.load(ln_weight + head * D + tl.arange(0, D))[None, :]
    slot = tl.cast(tl.program_id(0), tl.int64)
    slots = tl.cast(tl.num_programs(0), tl.int64)
    dnorm, dtoken_scale, states, _ = parts_of(parts, slots, D)
    s = tl.load(states + slot * 2 * D * D + state_offsets(D))
    # Its bias is not needed.
    ds, _ = load_state(states + (slot * 2 + 1) * D * D, states, D, WIDTH)
    causal = tl.arange(0, CHUNK)[None, :, None] <= tl.arange(0, CHUNK)[None, None, :]
    dgamma = tl.zeros((CHUNK, D), ACC)
    dlam = tl.zeros((CHUNK, D), ACC)
    dlast = tl.zeros((CHUNK,), ACC)
    first = part * segment
    last = tl.minimum(first + segment, chunks) - 1
    # The tokens of the next chunk are on their way while this one is computed.
    k_next = load_tile(k, k_step, last, T, D, SIZE)
    g_next = tl.reshape(tl.load(scratch_tile(tiles, last, TILE_G, D)), (CHUNK, D))
    q_next = load_tile(q, q_step, last, T, D, SIZE)
    d_next = tl.load(scratch_tile(tiles, last, TILE_D, D))
    dz_next = tl.load(scratch_tile(tiles, last, TILE_DZ, D))
    steps_next = load_rows(eta, eta_step, last, T, SIZE)
    for n in tl.range(last, first - 1, -1, num_stages=1):
        before = tl.maximum(n - 1, 0)
        k_tile, g_tile, q_tile, d_tile, dz_tile = k_next, g_next, q_next, d_next, dz_next
        d_tile, dz_tile = from_scratch(d_tile, D), from_scratch(dz_tile, D)
        steps = steps_next
        k_next = load_tile(k, k_step, before, T, D, SIZE)
        g_next = tl.reshape(tl.load(scratch_tile(tiles, before, TILE_G, D)), (CHUNK, D))
        q_next = load_tile(q, q_step, before, T, D, SIZE)
        d_next = tl.load(scratch_tile(tiles, before, TILE_D, D))
        dz_next = tl.load(scratch_tile(tiles, before, TILE_DZ, D))
        steps_next = load_rows(eta, eta_step, before, T, SIZE)
        dp_tile = tl.load(scratch_tile(tiles, n, TILE_DP, D))
        slope_tile = tl.reshape(tl.load(scratch_tile(tiles, n, TILE_SLOPE, D)), (CHUNK, D))
        de_last = tl.load(scratch_rows(rows, n, ROW_DLAST))
        de = tl.load(scratch_rows(rows, n, ROW_DETA))

        # A step back. The state enters linearly here, so a sum's rounding error is harmless.
        eg = descent_step(g_tile, (tau_last * steps)[:, None])
        s = add_dot(s, transpose(split_features(-eg, D)), repeat_blocks(k_tile, D), PRECISION)
        ds_now = split_inputs(ds.to(k_tile.dtype), D)
        ds = add_dot(ds, transpose(dz_tile), repeat_blocks(k_tile, D), PRECISION)
        s_now = split_inputs(s.to(k_tile.dtype), D)
        gd = scores(g_tile, concat_features(d_tile, D), D, PRECISION, ACC)
        # Multiplies the product by the steps: e⊙G would be one more operand for all warps.
        dk_tile = dot(repeat_blocks(g_tile, D), ds_now, ACC, PRECISION)
        dk_tile *= -column(tau_last * steps)
        dz_whole = repeat_blocks(concat_features(dz_tile, D), D)
        dk_tile = add_dot(dk_tile, dz_whole, s_now, PRECISION)
        es = tl.where(causal, -steps[None, :, None] * tau[None, None, :] * gd, 0)
        es = es.to(k_tile.dtype)
        dk_tile = add_dot(dk_tile, es, split_features(q_tile, D), PRECISION)
        ds = add_dot(ds, transpose(d_tile), repeat_blocks(q_tile, D), PRECISION)

        dp = concat_features(from_scratch(dp_tile, D), D).to(ACC)
        dy = gamma * dp
        store_tile(dv + dense, dense_step, n, T, -dy, D, SIZE)
        store_tile(dk + dense, dense_step, n, T, concat_features(dk_tile, D) + dy, D, SIZE)
        dgamma += dp * slope_tile.to(ACC)
        dlam += dy
        dlast += steps * de_last
        de += tau_last * de_last
        inside = token_mask(n, T, SIZE)
        tl.store(row_pointers(deta, eta_step, n, SIZE), de, mask=inside)
    dtoken_scale += slot * SIZE + SIZE - 1
    tl.store(dnorm + (slots + slot) * D + tl.arange(0, D), tl.sum(dgamma, axis=0))
    tl.store(dnorm + (3 * slots + slot) * D + tl.arange(0, D), tl.sum(dlam, axis=0))
    tl.store(dtoken_scale, tl.load(dtoken_scale) + tl.sum(dlast, axis=0))


@triton.jit
def add_rows(x, groups, step, splits, out, D: tl.constexpr, WIDTH: tl.constexpr):
    """Adds up rows of WIDTH ≤ D numbers: groups of `splits` rows, `step` numbers apart."""
    # A turn of the loop waits for its loads: 32 of each thread of 4 warps are on their way at once.
    ROWS: tl.constexpr = 4096 // D
    columns = tl.arange(0, D)
    total = tl.zeros((D,), x.dtype.element_ty)
    for first in tl.range(0, groups * splits, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < groups * splits)[:, None] & (columns < WIDTH)[None, :]
        rows = tl.cast(rows // splits, tl.int64) * step + rows % splits * WIDTH
        row = x + rows[:, None] + columns[None, :]
        total += tl.sum(tl.load(row, mask=inside, other=0.0), axis=0)
    tl.store(out + columns, total, mask=columns < WIDTH)


@triton.jit(do_not_specialize=VARYING)
def backward_sums(
    parts,  # of the other kernels
    totals,  # dw0 (R, H, D, D); db0, dln_weight, dln_bias (R, H, D); dtoken_scale (R, b)
    B,
    R,
    H,
    segments,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """One program adds up a row of a gradient, in the order of images, heads and segments."""
    model, row = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    models, step = R * H, R * H * segments
    dnorm, dtoken_scale, _, dw0 = parts_of(parts, B * step, D)
    if row <= D:
        dw0 += (model * (D + 1) + row) * D
        out = totals[0] + (model * D + row) * D if row < D else totals[1] + model * D
        add_rows(dw0, B, models * (D + 1) * D, 1, out, D, D)
    elif row <= D + 2:
        dnorm += (tl.cast(row - D - 1, tl.int64) * 2 * B * models + model) * segments * D
        out = totals[2] + model * D if row == D + 1 else totals[3] + model * D
        add_rows(dnorm, 2 * B, step * D, segments, out, D, D)
    elif HAS_SCALE and model % H == 0:
        dtoken_scale += model * segments * SIZE
        out = totals[4] + model // H * SIZE
        add_rows(dtoken_scale, B, step * SIZE, H * segments, out, CHUNK, SIZE)
