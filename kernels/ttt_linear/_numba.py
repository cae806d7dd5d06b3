"""TTT-linear on a CPU, compiled by numba: README.md's maths, a chunk at a time in the cache.

One program runs one scan of one head of one image, from its first chunk to its last. Programs are
spread over torch's threads, and each writes a part of every result that is its own: neither the
number of threads nor their order changes a bit. The backward pass walks forth for the states (it
keeps those of one program for every thread, 4·d/b times the program's share of q) and once back.

fp32 and fp64 run as they are. bf16 and fp16 are converted to fp32 on the way in and out, with G
rounded where the reference rounds it. Chunks stand in zeros, `(b', d')` with both multiples of
COLUMNS; sums over features and tokens are of the real ones alone.
"""

import numpy as np
import torch
from torch import Tensor

from .._inputs import gradient_dtype, state_dtype
from .._numba import COLUMNS, add_product, jit, padded, parallel, part
from . import reference
from .reference import Inputs

# The scores of a chunk, (b, b), should stay in the cache with its tokens.
_LARGEST_MINI_BATCH = 128


def supported(inputs: Inputs, mini_batch_size: int) -> str | None:
    """Why the kernels cannot run with these arguments, in a sentence; None where they can."""
    if mini_batch_size > _LARGEST_MINI_BATCH:
        return f'mini_batch_size must be at most {_LARGEST_MINI_BATCH}, got {mini_batch_size}'
    return None


# ------------------------------------------------------------------------------- parts of a chunk


@part
def _program(number, sizes, reverse):
    """Image, scan and head of a program, and whether it reads from the last token to the first."""
    scans, heads = sizes[1], sizes[2]
    scan = number // heads % scans
    return number // (scans * heads), scan, number % heads, reverse[scan]


@part
def _walk(strides, tokens, image, scan, head, back):
    """Where a program's first token lies in memory, and how far it is to the next one."""
    start = image * strides[0] + scan * strides[2] + head * strides[3]
    step = strides[1]
    return (start + (tokens - 1) * step, -step) if back else (start, step)


@part
def _load(out, x, start, step, count, dim):
    """Rows of `dim` numbers, `step` apart, into the corner of `out`, and zeros below them."""
    for t in range(count):
        row, line = out[t], x[start + t * step : start + t * step + dim]
        for i in range(dim):
            row[i] = line[i]
    _zero(out[count:])


@part
def _zero(x):
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.shape[0]):
            row[j] = 0


@part
def _copy(to, x, rows, columns):
    """The corner of a matrix."""
    for i in range(rows):
        row, line = to[i], x[i]
        for j in range(columns):
            row[j] = line[j]


@part
def _transpose(out, x):
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(x.shape[1]):
            out[j, i] = row[j]


@part
def _start(z, c):
    """Every row of `z` becomes `c`."""
    for t in range(z.shape[0]):
        row = z[t]
        for i in range(row.shape[0]):
            row[i] = c[i]


@part
def _normalize(z, numbers):
    """A row z becomes (z − mean)/σ; returns 1/σ."""
    dim, inverse, eps, one = numbers
    total = one - one
    for i in range(dim):
        total += z[i]
    mean = total * inverse
    squares = one - one
    for i in range(dim):
        z[i] -= mean
        squares += z[i] * z[i]
    rstd = one / np.sqrt(squares * inverse + eps)
    for i in range(dim):
        z[i] *= rstd
    return rstd


@part
def _inner_gradient(p, x, key, value, gain, shift, rstd, numbers):
    """G = Π(γY), Y = γX + λ − (V − K), of a token."""
    dim, inverse, _, one = numbers
    mean, along = one - one, one - one
    for i in range(dim):
        p[i] = gain[i] * (gain[i] * x[i] + shift[i] - (value[i] - key[i]))
        mean += p[i]
        along += p[i] * x[i]
    mean, along = mean * inverse, along * inverse
    for i in range(dim):
        p[i] = (p[i] - mean - x[i] * along) * rstd


@part
def _query_gradient(d, x, do, gain, dgain, dshift, rstd, numbers):
    """D = Π(γ·dO), and the output's part of dγ and dλ, of a token."""
    dim, inverse, _, one = numbers
    mean, along = one - one, one - one
    for i in range(dim):
        dgain[i] += do[i] * x[i]
    for i in range(dim):
        dshift[i] += do[i]
    for i in range(dim):
        d[i] = gain[i] * do[i]
        mean += d[i]
        along += d[i] * x[i]
    mean, along = mean * inverse, along * inverse
    for i in range(dim):
        d[i] = (d[i] - mean - x[i] * along) * rstd


@part
def _key_gradient(
    u, h, g, x, value, key, gain, shift, e, rstd, dz, dkey, dvalue, dgain, dshift, numbers
):
    """From U's query side and H = KdW' + dc' of a token to dZ, dY and what they add; returns de.

    U becomes dY and `value` becomes Y on the way.
    """
    dim, inverse, _, one = numbers
    zero = one - one
    de, mean, along, with_p, with_g = zero, zero, zero, zero, zero
    for i in range(dim):
        value[i] = gain[i] * x[i] + shift[i] - (value[i] - key[i])
        with_p += gain[i] * value[i] * x[i]
    for i in range(dim):
        de -= h[i] * g[i]
        u[i] -= e * h[i]
        mean += u[i]
        along += u[i] * x[i]
        with_g += u[i] * g[i]
    mean, along = mean * inverse, along * inverse
    with_p, with_g = with_p * inverse * rstd, with_g * inverse * rstd
    mean_dx, along_dx = zero, zero
    for i in range(dim):
        u[i] = (u[i] - mean - x[i] * along) * rstd
        dx = gain[i] * gain[i] * u[i]
        mean_dx += dx
        along_dx += dx * x[i]
    mean_dx, along_dx, along = mean_dx * inverse, along_dx * inverse, along * rstd
    for i in range(dim):
        dx = (gain[i] * gain[i] * u[i] - mean_dx - x[i] * along_dx) * rstd
        dz[i] = dx - with_p * u[i] - along * g[i] - with_g * x[i]
    for i in range(dim):
        dgain[i] += u[i] * (value[i] + gain[i] * x[i])
    for i in range(dim):
        u[i] *= gain[i]
    for i in range(dim):
        dshift[i] += u[i]
        dkey[i] += u[i]
    for i in range(dim):
        dvalue[i] = -u[i]
    return de


@part
def _affine(out, x, gain, shift, query, numbers):
    for i in range(numbers[0]):
        out[i] = query[i] + (gain[i] * x[i] + shift[i])


@part
def _scores(scores, m, keys, queries, keys_t, tau, step, count):
    """QKᵀ + 1, and −M = −E⊙(QKᵀ + 1)."""
    _transpose(keys_t, keys)
    for t in range(scores.shape[0]):
        row = scores[t]
        for i in range(row.shape[0]):
            row[i] = 1
    add_product(scores, queries, keys_t)
    _zero(m)
    for t in range(count):
        for s in range(t + 1):
            m[t, s] = -scores[t, s] * (tau[t] * step[s])


@part
def _decay(decayed, g, step, last, count, dim):
    """−e⊙G; the rows below are zero."""
    for t in range(count):
        e = -last * step[t]
        row, line = decayed[t], g[t]
        for i in range(dim):
            row[i] = e * line[i]
    _zero(decayed[count:])


@part
def _update(w, c, keys, decayed, count):
    """W' = W − (e⊙K)ᵀG, c' = c − eᵀG."""
    add_product(w, keys.T, decayed)
    for t in range(count):
        line = decayed[t]
        for i in range(c.shape[0]):
            c[i] += line[i]


@part
def _round_to_bf16(row):
    bits = row.view(np.uint32)
    for i in range(bits.shape[0]):
        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
        bits[i] = (bits[i] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


# --------------------------------------------------------------------------------------- programs


@jit
def _forward(
    start,
    stop,
    sizes,
    reverse,
    numbers,
    rounds,
    q,
    k,
    v,
    eta,
    parameters,
    strides,
    o,
    g,
    segment,
    w_kept,
    c_kept,
):
    tokens, _, _, dim, size, rows, columns = sizes
    w0, b0, weight, bias, token_scale = parameters
    kq = np.zeros((2 * rows, columns), w0.dtype)
    keys, queries = kq[:rows], kq[rows:]
    z = np.zeros((2 * rows, columns), w0.dtype)
    keys_t = np.zeros((columns, rows), w0.dtype)
    scores, m = np.zeros((rows, rows), w0.dtype), np.zeros((rows, rows), w0.dtype)
    inner, decayed = np.zeros((rows, columns), w0.dtype), np.zeros((rows, columns), w0.dtype)
    values = np.zeros((rows, columns), w0.dtype)
    step = np.zeros(rows, w0.dtype)
    state = np.zeros((columns + 1, columns), w0.dtype)
    w, c = state[:columns], state[columns]
    for number in range(start, stop):
        image, scan, head, back = _program(number, sizes, reverse)
        # A NaN of the program before would come out of the padding: 0 · NaN.
        _zero(state)
        _zero(inner)
        _copy(w, w0[scan, head], dim, dim)
        _copy(state[columns:], b0[scan, head : head + 1], 1, dim)
        gain, shift, tau = weight[scan, head], bias[scan, head], token_scale[scan]
        q_at, q_step = _walk(strides[0], tokens, image, scan, head, back)
        k_at, k_step = _walk(strides[1], tokens, image, scan, head, back)
        v_at, v_step = _walk(strides[2], tokens, image, scan, head, back)
        eta_at, eta_step = _walk(strides[3], tokens, image, scan, head, back)
        at, ahead = _walk(strides[4], tokens, image, scan, head, back)
        for first in range(0, tokens, size):
            count = min(size, tokens - first)
            _load(keys, k, k_at + first * k_step, k_step, count, dim)
            _load(queries, q, q_at + first * q_step, q_step, count, dim)
            _load(values, v, v_at + first * v_step, v_step, count, dim)
            for t in range(count):
                step[t] = eta[eta_at + (first + t) * eta_step]
            _start(z, c)
            add_product(z, kq, w)
            for t in range(count):
                x, key, value, p = z[t], keys[t], values[t], inner[t]
                rstd = _normalize(x, numbers)
                _inner_gradient(p, x, key, value, gain, shift, rstd, numbers)
                if rounds:
                    _round_to_bf16(p)
                place = at + (first + t) * ahead
                line = g[place : place + dim]
                for i in range(dim):
                    line[i] = p[i]
            _decay(decayed, inner, step, tau[-1], count, dim)
            _scores(scores, m, keys, queries, keys_t, tau, step, count)
            add_product(z[rows:], m, inner)
            _update(w, c, keys, decayed, count)
            for t in range(count):
                x = z[rows + t]
                _normalize(x, numbers)
                place = at + (first + t) * ahead
                _affine(o[place : place + dim], x, gain, shift, queries[t], numbers)
            if w_kept.shape[3] and ((first + size) % segment == 0 or first + size >= tokens):
                n = first // segment
                _copy(w_kept[image, scan, head, n], w, dim, dim)
                _copy(c_kept[image, scan, head, n : n + 1], state[columns:], 1, dim)


@jit
def _backward(
    start,
    stop,
    sizes,
    reverse,
    numbers,
    do,
    q,
    k,
    v,
    eta,
    g,
    parameters,
    strides,
    dq,
    dk,
    dv,
    deta,
    parts,
):
    tokens, _, _, dim, size, rows, columns = sizes
    w0, b0, weight, bias, token_scale = parameters
    chunks = -(-tokens // size)
    states = np.zeros((chunks, columns + 1, columns), w0.dtype)
    kq, z, dzd = np.zeros((3, 2 * rows, columns), w0.dtype)  # K and Q, Z and Z̄, dZ and D
    keys, queries, dz, d = kq[:rows], kq[rows:], dzd[:rows], dzd[rows:]
    grad, inner, decayed, values, u, h, dkeys, dqueries = np.zeros((8, rows, columns), w0.dtype)
    keys_t, inner_t, dz_t, d_t, decayed_t, dk_t, dq_t = np.zeros((7, columns, rows), w0.dtype)
    scores, m, s, es = np.zeros((4, rows, rows), w0.dtype)
    step, dstep = np.zeros((2, rows), w0.dtype)
    state, dstate = np.zeros((2, columns + 1, columns), w0.dtype)
    w, c, dw, dc = state[:columns], state[columns], dstate[:columns], dstate[columns]
    for number in range(start, stop):
        image, scan, head, back = _program(number, sizes, reverse)
        gain, shift, tau = weight[scan, head], bias[scan, head], token_scale[scan]
        last = tau[-1]
        q_at, q_step = _walk(strides[0], tokens, image, scan, head, back)
        k_at, k_step = _walk(strides[1], tokens, image, scan, head, back)
        v_at, v_step = _walk(strides[2], tokens, image, scan, head, back)
        eta_at, eta_step = _walk(strides[3], tokens, image, scan, head, back)
        at, ahead = _walk(strides[4], tokens, image, scan, head, back)
        own = parts[image, scan, head]
        for i in range(own.shape[0]):
            own[i] = 0
        at_gain = dim * (dim + 1)
        dgain, dshift = own[at_gain : at_gain + dim], own[at_gain + dim : at_gain + 2 * dim]
        dtau = own[at_gain + 2 * dim :]

        # Forth, for the states before each chunk. A NaN of the program before would come out of the
        # padding: 0 · NaN.
        _zero(state)
        _copy(w, w0[scan, head], dim, dim)
        _copy(state[columns:], b0[scan, head : head + 1], 1, dim)
        for n in range(chunks):
            first = n * size
            count = min(size, tokens - first)
            _copy(states[n], state, columns + 1, columns)
            _load(keys, k, k_at + first * k_step, k_step, count, dim)
            _load(inner, g, at + first * ahead, ahead, count, dim)
            for t in range(count):
                step[t] = eta[eta_at + (first + t) * eta_step]
            _decay(decayed, inner, step, last, count, dim)
            _update(w, c, keys, decayed, count)

        # Back, with the gradient of the state.
        _zero(dstate)
        for n in range(chunks - 1, -1, -1):
            first = n * size
            count = min(size, tokens - first)
            _load(keys, k, k_at + first * k_step, k_step, count, dim)
            _load(queries, q, q_at + first * q_step, q_step, count, dim)
            _load(values, v, v_at + first * v_step, v_step, count, dim)
            _load(inner, g, at + first * ahead, ahead, count, dim)
            _load(grad, do, at + first * ahead, ahead, count, dim)
            for t in range(count):
                step[t] = eta[eta_at + (first + t) * eta_step]
            _decay(decayed, inner, step, last, count, dim)
            _scores(scores, m, keys, queries, keys_t, tau, step, count)
            _start(z, states[n, columns])
            add_product(z, kq, states[n, :columns])
            add_product(z[rows:], m, inner)

            # The query side: D, S = DGᵀ, dE and E⊙S.
            for t in range(count):
                x = z[rows + t]
                rstd = _normalize(x, numbers)
                _query_gradient(d[t], x, grad[t], gain, dgain, dshift, rstd, numbers)
            _zero(d[count:])
            _zero(dz[count:])
            _transpose(inner_t, inner)
            _zero(s)
            add_product(s, d, inner_t)
            _zero(es)
            for t in range(rows):
                dstep[t] = 0
            for t in range(count):
                for i in range(t + 1):
                    de = -s[t, i] * scores[t, i]
                    es[t, i] = -s[t, i] * (tau[t] * step[i])
                    dstep[i] += tau[t] * de
                    dtau[t] += step[i] * de
            _zero(dqueries)
            add_product(dqueries, es, keys)
            _zero(dkeys)
            add_product(dkeys, es.T, queries)
            _zero(u)
            add_product(u, m.T, d)

            # The key side: U, and back through the inner gradient and the inner model.
            _start(h, dc)
            add_product(h, keys, dw)
            for t in range(count):
                x, e, place = z[t], last * step[t], at + (first + t) * ahead
                rstd = _normalize(x, numbers)
                de = _key_gradient(
                    u[t],
                    h[t],
                    inner[t],
                    x,
                    values[t],
                    keys[t],
                    gain,
                    shift,
                    e,
                    rstd,
                    dz[t],
                    dkeys[t],
                    dv[place : place + dim],
                    dgain,
                    dshift,
                    numbers,
                )
                dstep[t] += last * de
                dtau[-1] += step[t] * de
                deta[place // dim] = dstep[t]

            # Through the state: dQ += DWᵀ, dK += dZWᵀ − e⊙(GdW'ᵀ), with tokens as columns.
            _transpose(d_t, d)
            _transpose(dz_t, dz)
            _transpose(decayed_t, decayed)
            _zero(dq_t)
            add_product(dq_t, states[n, :columns], d_t)
            _zero(dk_t)
            add_product(dk_t, states[n, :columns], dz_t)
            add_product(dk_t, dw, decayed_t)
            for t in range(count):
                place = at + (first + t) * ahead
                line, row, more = dq[place : place + dim], grad[t], dqueries[t]
                for i in range(dim):
                    line[i] = row[i] + more[i] + dq_t[i, t]
                line, row = dk[place : place + dim], dkeys[t]
                for i in range(dim):
                    line[i] = row[i] + dk_t[i, t]
            add_product(dw, kq.T, dzd)
            for t in range(count):
                row, line = dz[t], d[t]
                for i in range(dim):
                    dc[i] += row[i] + line[i]
        for i in range(dim):
            for j in range(dim):
                own[i * dim + j] = dw[i, j]
            own[dim * dim + i] = dc[i]


# ---------------------------------------------------------------------------------------- tensors


def _flat(x: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, tuple[int, ...]]:
    """The memory of `(B, T, R, H, …)` as one row, and its first four strides."""
    x = x.detach().to(dtype)
    if x.dim() > 4 and x.stride(-1) != 1:
        x = x.contiguous()
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)).numpy(), x.stride()[:4]


def _whole(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy()


def _common(
    inputs: Inputs, directions: str, mini_batch_size: int, eps: float
) -> tuple[tuple, tuple, tuple, tuple]:
    """Sizes, directions, numbers in the state's type and parameters, as both passes take them."""
    q, _, _, _, w0, b0, ln_weight, ln_bias, token_scale = inputs
    _, tokens, scans, heads, dim = q.shape
    size = min(mini_batch_size, tokens)
    sizes = (tokens, scans, heads, dim, size, padded(size, COLUMNS), padded(dim, COLUMNS))
    if token_scale is None:
        token_scale = w0.new_ones((scans, mini_batch_size))
    parameters = tuple(_whole(x) for x in (w0, b0, ln_weight, ln_bias, token_scale))
    reverse = np.array([way == 'b' for way in directions])
    numbers = (dim, *(parameters[0].dtype.type(x) for x in (1 / dim, eps, 1)))
    return sizes, reverse, numbers, parameters


def forward(
    inputs: Inputs,
    directions: str,
    mini_batch_size: int,
    eps: float,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.forward`."""
    q, k, v, eta = inputs[:4]
    batch, tokens, scans, heads, dim = q.shape
    state = state_dtype(q.dtype)
    sizes, reverse, numbers, parameters = _common(inputs, directions, mini_batch_size, eps)
    o, g = (q.new_empty(q.shape, dtype=state) for _ in range(2))
    segment = reference.SEGMENT * mini_batch_size
    lead = (batch, scans, heads, -(-tokens // segment) if keep else 0)
    w_kept, c_kept = (q.new_empty((*lead, *x), dtype=state) for x in ((dim, dim), (dim,)))
    if batch:
        flat, strides = zip(*(_flat(x, state) for x in (q, k, v, eta, o)), strict=True)
        parallel(
            _forward,
            batch * scans * heads,
            sizes,
            reverse,
            numbers,
            q.dtype == torch.bfloat16,
            *flat[:4],
            parameters,
            strides,
            flat[4],
            g.view(-1).numpy(),
            segment,
            w_kept.numpy(),
            c_kept.numpy(),
        )
    g = g if keep else g.new_empty(0)
    return o.to(q.dtype), g.to(gradient_dtype(q.dtype)), w_kept, c_kept


def backward(
    do: Tensor,
    inputs: Inputs,
    g: Tensor,
    w_kept: Tensor,
    c_kept: Tensor,
    directions: str,
    mini_batch_size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """As `reference.backward`; needs no kept state."""
    q, k, v, eta, w0, *_, token_scale = inputs
    batch, _, scans, heads, dim = q.shape
    state = state_dtype(q.dtype)
    sizes, reverse, numbers, parameters = _common(inputs, directions, mini_batch_size, eps)
    dq, dk, dv = (q.new_empty(q.shape, dtype=state) for _ in range(3))
    deta = q.new_empty(q.shape[:-1], dtype=state)
    length = dim * (dim + 3) + mini_batch_size
    parts = q.new_empty((batch, scans, heads, length), dtype=state)
    if batch:
        flat, strides = zip(*(_flat(x, state) for x in (q, k, v, eta, dq)), strict=True)
        parallel(
            _backward,
            batch * scans * heads,
            sizes,
            reverse,
            numbers,
            _flat(do.contiguous(), state)[0],
            *flat[:4],
            _flat(g.contiguous(), state)[0],
            parameters,
            strides,
            flat[4],
            *(x.view(-1).numpy() for x in (dk, dv, deta)),
            parts.numpy(),
        )
    # One after the other: torch's own sum depends on the number of threads.
    total = sum(parts.unbind(0), start=parts.new_zeros(parts.shape[1:]))
    dw0, db0, dweight, dbias, dscale = total.split([dim * dim, dim, dim, dim, mini_batch_size], -1)
    dscale = w0.new_empty((scans, 0)) if token_scale is None else sum(dscale.unbind(1))
    return (
        dq.to(q.dtype),
        dk.to(q.dtype),
        dv.to(q.dtype),
        deta,
        dw0.unflatten(-1, (dim, dim)).clone(memory_format=torch.contiguous_format),
        *(x.clone(memory_format=torch.contiguous_format) for x in (db0, dweight, dbias)),
        dscale,
    )
