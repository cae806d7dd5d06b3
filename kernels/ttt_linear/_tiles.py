"""What the TTT-linear kernels share: where a scan's tokens lie, its state, its products.

Token tiles are `(16, d)`, as in the formulas. The state is kept as `S = Wᵀ`, in d/16 blocks of 16
output features, `(d/16, 16, d)`, and there is one warp for each block: Triton gives the batch of
a batched product to the warps. So no warp repeats another's work, as all would with the 16 rows
of `K W`, a block goes from sum to operand within its registers, and Triton never takes WGMMA,
which ptxas miscompiles when its operand is in registers (README.md, "The kernels").
"""

import triton
import triton.language as tl

# Tokens of a mini-batch; also the depth of one tensor-core instruction in half precision.
CHUNK = tl.constexpr(16)
# Integers that change from call to call: whether they are 1 or a multiple of 16 compiles nothing
# anew. (Floats never do.) Those of them that a kernel does not have are no harm.
VARYING = ('T', 'R', 'H', 'reverse_mask', 'segment', 'starts', 'eta_b', 'eta_t', 'eta_r', 'eta_h')


@triton.jit
def scan_start(scan, T, R, H, reverse_mask, stride_b, stride_t, stride_r, stride_h):
    """Elements from a tensor's start to a scan's first token, and from one token to the next.

    In 64 bits throughout: `B·T·R·H·d` passes 2³¹ long before a GPU's memory is full.
    """
    i_h = scan % H
    i_r = (scan // H) % R
    i_b = scan // (H * R)
    step = tl.cast(stride_t, tl.int64)
    start = tl.cast(i_b, tl.int64) * stride_b + tl.cast(i_r, tl.int64) * stride_r
    start += tl.cast(i_h, tl.int64) * stride_h
    reverse = ((reverse_mask >> i_r) & 1).to(tl.int64)
    start += reverse * (T - 1) * step
    return start, step * (1 - 2 * reverse)


@triton.jit
def dense_start(scan, T, R, H, reverse_mask, WIDTH: tl.constexpr):
    """`scan_start` of a contiguous `(B, T, R, H, WIDTH)`."""
    row = R * H * WIDTH
    return scan_start(
        scan, T, R, H, reverse_mask, tl.cast(T, tl.int64) * row, row, H * WIDTH, WIDTH
    )


@triton.jit
def tile_pointers(base, step, n, D: tl.constexpr):
    """Pointers `(16, D)` to the tokens of chunk `n`; `base` is at the scan's first token."""
    inside = tl.arange(0, CHUNK)[:, None] * step.to(tl.int32) + tl.arange(0, D)[None, :]
    return base + tl.cast(n, tl.int64) * CHUNK * step + inside


@triton.jit
def load_tile(base, step, n, T, D: tl.constexpr):
    """Tokens of chunk `n`, `(16, D)`; zeros beyond the last token."""
    inside = n * CHUNK + tl.arange(0, CHUNK) < T
    return tl.load(tile_pointers(base, step, n, D), mask=inside[:, None], other=0.0)


@triton.jit
def store_tile(base, step, n, T, tile, D: tl.constexpr):
    """Writes the tokens of chunk `n`; nothing beyond the last token."""
    inside = n * CHUNK + tl.arange(0, CHUNK) < T
    pointers = tile_pointers(base, step, n, D)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def row_pointers(base, step, n):
    """Pointers `(16,)` to one number a token."""
    return base + tl.cast(n, tl.int64) * CHUNK * step + tl.arange(0, CHUNK) * step.to(tl.int32)


@triton.jit
def load_rows(base, step, n, T):
    """One number a token of chunk `n`, `(16,)`; zero beyond the last token.

    For the steps ℓ that zero is what makes a ragged tail equal to a shorter mini-batch.
    """
    inside = n * CHUNK + tl.arange(0, CHUNK) < T
    return tl.load(row_pointers(base, step, n), mask=inside, other=0.0)


@triton.jit
def blocks(x, D: tl.constexpr):
    """A `(16, D)` tile of tokens as columns, in blocks of features: `(D/16, 16, 16)`."""
    return tl.reshape(tl.trans(x), (D // CHUNK, CHUNK, CHUNK))


@triton.jit
def tokens(z, D: tl.constexpr):
    """The inverse of `blocks`."""
    return tl.trans(tl.reshape(z, (D, CHUNK)))


@triton.jit
def turned(s, D: tl.constexpr):
    """The transpose of a state, in blocks of its own."""
    return tl.reshape(tl.trans(tl.reshape(s, (D, D))), (D // CHUNK, CHUNK, D))


@triton.jit
def product(a, b, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """`(n, 16, K) (K, N)` → `(n, 16, N)`: every block times the same columns."""
    b = tl.broadcast_to(b[None, :, :], (a.shape[0], b.shape[0], b.shape[1]))
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """`acc + product(a, b)`, summed where the tensor cores sum."""
    b = tl.broadcast_to(b[None, :, :], (a.shape[0], b.shape[0], b.shape[1]))
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def in_place(x, scale, D: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """`scale·x`, a loaded `(16, D)`, in the accumulators' layout: the product with `scale·1`.

    Triton would rather bring what stands in that layout to the layout of loads, in fp32 through
    shared memory and with the statistics split over both. In half precision two tensor-core
    instructions, and exact ones, leave it no choice.
    """
    if x.dtype.primitive_bitwidth == 16:
        t = tl.arange(0, CHUNK)
        one = tl.where(t[:, None] == t[None, :], scale, 0).to(x.dtype)
        x = tokens(product(blocks(x, D), one, PRECISION, ACC), D)
    else:
        x = x.to(ACC) * scale
    return x


@triton.jit
def state_offsets(D: tl.constexpr):
    """Offsets of S in blocks, in a W `(D in, D out)` in memory."""
    block = tl.arange(0, D // CHUNK)[:, None, None] * CHUNK
    return block + tl.arange(0, CHUNK)[None, :, None] + tl.arange(0, D)[None, None, :] * D


@triton.jit
def bias_offsets(D: tl.constexpr):
    """Offsets `(D/16, 16)` of a vector of output features."""
    return tl.arange(0, D // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def load_state(w, c, D: tl.constexpr):
    """S `(D/16, 16, D)`, and the bias state in every column of a `(D/16, 16, 16)`.

    So spread, the bias is where the tensor cores start their sums, and its update is one more
    product; as a vector it would cost an addition and a reduction over tokens in every chunk.
    """
    bias = tl.load(c + bias_offsets(D))
    bias = tl.broadcast_to(bias[:, :, None], (D // CHUNK, CHUNK, CHUNK))
    return tl.load(w + state_offsets(D)), bias


@triton.jit
def output_mean(x, D: tl.constexpr):
    """Mean over the output features of S or the bias, ready to broadcast: `(1, 1, …)`."""
    return (tl.sum(tl.sum(x, axis=1), axis=0) / D)[None, None, :]


@triton.jit
def centred(s, c, D: tl.constexpr):
    """The state without its mean over the outputs, to which LayerNorm is blind.

    Updates have no such mean either, so Z stays free of it, and the variance loses nothing to
    cancellation when it is formed from the sum of squares, in one pass.
    """
    return s - output_mean(s, D), c - output_mean(c, D)


@triton.jit
def store_state(w, c, s, bias, D: tl.constexpr):
    """The inverse of `load_state`."""
    tl.store(w + state_offsets(D), s)
    first = tl.arange(0, CHUNK)[None, None, :] == 0
    tl.store(c + bias_offsets(D), tl.sum(tl.where(first, bias, 0), axis=2))


@triton.jit
def operand(x, like):
    """`x` in the type of the tokens `like`, to be multiplied with; fp16 saturates.

    Infinity would leave a NaN behind it in every later token of the scan, at any scale of the loss.
    """
    if like.dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(like.dtype)


@triton.jit
def update(g, k, e, ACC: tl.constexpr, D: tl.constexpr):
    """`(e⊙G)ᵀ` in blocks, in the type of the keys: what a mini-batch writes, times its keys."""
    return blocks(operand(g.to(ACC) * e[:, None], k), D)


@triton.jit
def walk(s, c, g, k, e, D: tl.constexpr, PRECISION: tl.constexpr):
    """Adds `(e⊙G)ᵀK` to S and `(e⊙G)ᵀ1` to c: a step back, or with -e a step forth.

    The rounding of the operands depends on neither the sign of e nor the kernel, so a walk back
    meets the states of the forward pass again, up to the rounding of the sums.
    """
    eg = update(g, k, e, s.dtype, D)
    ones = tl.full((CHUNK, CHUNK), 1.0, k.dtype)
    return add_product(s, eg, k, PRECISION), add_product(c, eg, ones, PRECISION)


@triton.jit
def normalized(z, eps, D: tl.constexpr):
    """LN̂ of the rows of a `(16, D)` whose means are near zero, and 1/σ `(16,)`."""
    mean = tl.sum(z, axis=1) / D
    rstd = tl.rsqrt(tl.sum(z * z, axis=1) / D - mean * mean + eps)
    return (z - mean[:, None]) * rstd[:, None], rstd


@triton.jit
def projected(u, x, rstd, D: tl.constexpr):
    """Π(u) = (u − mean(u) − x·mean(u⊙x))/σ, the gradient of LN̂ with respect to its input."""
    mean_u = tl.sum(u, axis=1) / D
    mean_ux = tl.sum(u * x, axis=1) / D
    return (u - mean_u[:, None] - x * mean_ux[:, None]) * rstd[:, None]


@triton.jit
def token_scales(token_scale, i_r, HAS_SCALE: tl.constexpr, ACC: tl.constexpr):
    """τ `(16,)` and its last entry τ_b; ones where there is none."""
    if HAS_SCALE:
        tau = tl.load(token_scale + i_r * CHUNK + tl.arange(0, CHUNK))
        tau_last = tl.load(token_scale + i_r * CHUNK + CHUNK - 1)
    else:
        tau = tl.full((CHUNK,), 1.0, ACC)
        tau_last = tl.full((), 1.0, ACC)
    return tau, tau_last
