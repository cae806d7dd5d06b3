"""What the TTT-linear kernels share: where a scan's tokens lie, its state, its products.

A chunk is up to 16 tokens of one mini-batch. A mini-batch of SIZE = b tokens is ⌈b/16⌉ chunks, the
last of them filled up with tokens that are zero, as the end of a scan is.

Tokens are loaded as tiles `(16, d)`, as in the formulas, and multiplied as `(d/16, 16, 16)`, tokens
in rows, d/16 blocks of 16 features: one warp for each block, as Triton gives the batch of a batched
product to the warps. The state is kept as `S = Wᵀ`, in blocks of 16 output features,
`(d/16, 16, d)`. So no warp repeats another's work, as all would with the 16 rows of `K W`; a block
of S goes from sum to operand within its registers; a sum over features takes two exchanges in a
warp and one between warps, for sixteen tokens at once; and Triton never takes WGMMA, which ptxas
miscompiles when its operand is in registers (README.md, "The kernels").
"""

import os

import triton
import triton.language as tl

# Rows of a tile of tokens: the depth of one tensor-core instruction in half precision.
CHUNK = tl.constexpr(16)
# Integers that change from call to call: whether they are 1 or a multiple of 16 compiles nothing
# anew. (Floats never do.) Those of them that a kernel does not have are no harm.
VARYING = ('T', 'R', 'H', 'reverse_mask', 'segment', 'eta_b', 'eta_t', 'eta_r', 'eta_h')
# Triton's interpreter reduces several tensors at once number by number, in Python.
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET', '0') == '1')


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


@triton.constexpr_function
def pieces(SIZE):
    """Chunks of a full mini-batch."""
    return -(-SIZE // CHUNK.value)


@triton.constexpr_function
def whole(SIZE):
    """Whether mini-batches are filled by their chunks."""
    return SIZE % CHUNK.value == 0


@triton.jit
def count(T, SIZE: tl.constexpr):
    """Chunks of T tokens in mini-batches of SIZE."""
    if whole(SIZE):
        chunks = tl.cdiv(T, CHUNK)
    else:
        chunks = T // SIZE * pieces(SIZE) + tl.cdiv(T % SIZE, CHUNK)
    return chunks


@triton.jit
def first_token(n, SIZE: tl.constexpr):
    """Place of chunk `n`'s first token in the order of the scan."""
    return n * CHUNK if whole(SIZE) else n // pieces(SIZE) * SIZE + n % pieces(SIZE) * CHUNK


@triton.jit
def own_tokens(n, T, SIZE: tl.constexpr):
    """Which of chunk `n`'s 16 rows hold a token: `(16,)`."""
    inside = first_token(n, SIZE) + tl.arange(0, CHUNK) < T
    if not whole(SIZE):
        inside = inside & (places(n, SIZE) < SIZE)
    return inside


@triton.jit
def places(n, SIZE: tl.constexpr):
    """Places of chunk `n`'s tokens in their mini-batch, `(16,)`."""
    return n % pieces(SIZE) * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def tile_pointers(base, step, n, D: tl.constexpr, SIZE: tl.constexpr):
    """Pointers `(16, D)` to the tokens of chunk `n`; `base` is at the scan's first token."""
    inside = tl.arange(0, CHUNK)[:, None] * step.to(tl.int32) + tl.arange(0, D)[None, :]
    return base + first_token(tl.cast(n, tl.int64), SIZE) * step + inside


@triton.jit
def load_tile(base, step, n, T, D: tl.constexpr, SIZE: tl.constexpr):
    """Tokens of chunk `n`, `(16, D)`; zeros where there is none."""
    inside = own_tokens(n, T, SIZE)
    return tl.load(tile_pointers(base, step, n, D, SIZE), mask=inside[:, None], other=0.0)


@triton.jit
def store_tile(base, step, n, T, tile, D: tl.constexpr, SIZE: tl.constexpr):
    """Writes the tokens of chunk `n`, and nothing where there is none."""
    inside = own_tokens(n, T, SIZE)
    pointers = tile_pointers(base, step, n, D, SIZE)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def row_pointers(base, step, n, SIZE: tl.constexpr):
    """Pointers `(16,)` to one number a token."""
    inside = tl.arange(0, CHUNK) * step.to(tl.int32)
    return base + first_token(tl.cast(n, tl.int64), SIZE) * step + inside


@triton.jit
def load_rows(base, step, n, T, SIZE: tl.constexpr):
    """One number a token of chunk `n`, `(16,)`; zero where there is none.

    For the steps ℓ that zero is what makes a ragged tail equal to a shorter mini-batch.
    """
    inside = own_tokens(n, T, SIZE)
    return tl.load(row_pointers(base, step, n, SIZE), mask=inside, other=0.0)


@triton.jit
def own_start(scan, chunks, WIDTH: tl.constexpr):
    """Elements before a scan in what kernels hand on to each other, `(scans, chunks, 16, WIDTH)`.

    In the order of the scan and in whole chunks: no stride is a variable, and nothing is masked.
    """
    return tl.cast(scan, tl.int64) * chunks * (CHUNK * WIDTH)


@triton.jit
def own_tile(base, n, D: tl.constexpr):
    """Pointers `(16, D)` to chunk `n`; `base` is at the scan."""
    return base + n * (CHUNK * D) + tl.arange(0, CHUNK)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def own_rows(base, n):
    """Pointers `(16,)` to one number a token of chunk `n`."""
    return base + n * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def split(x, D: tl.constexpr):
    """A `(16, D)` tile of tokens in blocks of features: `(D/16, 16, 16)`."""
    return tl.permute(tl.reshape(x, (CHUNK, D // CHUNK, CHUNK)), (1, 0, 2))


@triton.jit
def joined(z, D: tl.constexpr):
    """The inverse of `split`."""
    return tl.reshape(tl.permute(z, (1, 0, 2)), (CHUNK, D))


@triton.jit
def turned(x):
    """Every block transposed."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def across(s, D: tl.constexpr):
    """S `(D/16, 16, D)` in blocks of input features, outputs in rows: `(D/16, D, 16)`."""
    return tl.permute(tl.reshape(s, (D, D // CHUNK, CHUNK)), (1, 0, 2))


@triton.jit
def every(x, D: tl.constexpr):
    """A matrix for every block: `(D/16, …)`."""
    return tl.broadcast_to(x[None, :, :], (D // CHUNK, x.shape[0], x.shape[1]))


@triton.jit
def column(x):
    """One number a token `(16,)`, to broadcast over a `(D/16, 16, 16)`."""
    return x[None, :, None]


@triton.jit
def product(a, b, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """`a b`, in every block where there are blocks."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """`acc + product(a, b)`, summed where the tensor cores sum."""
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def total(a):
    """Sum over the features of a `(D/16, 16, 16)`: `(16,)`."""
    return tl.sum(tl.sum(a, axis=2), axis=0)


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def totals2(a, b):
    """`total` of two, in one exchange between the warps."""
    if INTERPRETED:
        a, b = total(a), total(b)
    else:
        a, b = tl.reduce((a, b), 2, _add2)
        a, b = tl.reduce((a, b), 0, _add2)
    return a, b


@triton.jit
def totals3(a, b, c):
    """`total` of three, in one exchange between the warps."""
    if INTERPRETED:
        a, b, c = total(a), total(b), total(c)
    else:
        a, b, c = tl.reduce((a, b, c), 2, _add3)
        a, b, c = tl.reduce((a, b, c), 0, _add3)
    return a, b, c


@triton.jit
def feature_offsets(D: tl.constexpr):
    """Offsets `(D/16, 16)` of a vector of features."""
    return tl.arange(0, D // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def load_features(x, D: tl.constexpr):
    """A vector of features, to broadcast over a `(D/16, 16, 16)`."""
    return tl.load(x + feature_offsets(D))[:, None, :]


@triton.jit
def state_offsets(D: tl.constexpr):
    """Offsets of S in blocks, in a W `(D in, D out)` in memory."""
    block = tl.arange(0, D // CHUNK)[:, None, None] * CHUNK
    return block + tl.arange(0, CHUNK)[None, :, None] + tl.arange(0, D)[None, None, :] * D


@triton.jit
def less_mean(x, mean, D: tl.constexpr, WIDTH: tl.constexpr):
    """`x − mean`, in blocks of features, of which those from WIDTH on stay zero."""
    x -= mean
    if WIDTH != D:
        x = tl.where(feature_offsets(D)[:, None, :] < WIDTH, x, 0)
    return x


@triton.jit
def load_state(w, c, D: tl.constexpr, WIDTH: tl.constexpr):
    """S `(D/16, 16, D)`, and the bias state in every row of a `(D/16, 16, 16)`, without their mean.

    So spread, the bias is where the tensor cores start their sums, and its update is one more
    product; as a vector it would cost an addition and a reduction over tokens in every chunk.

    LayerNorm is blind to a mean over the outputs, and updates have none: without it Z has mean
    zero, of which no sum need be formed, and the variance loses nothing to cancellation.
    """
    s = tl.load(w + state_offsets(D))
    s -= (tl.sum(tl.sum(s, axis=1), axis=0) / WIDTH)[None, None, :]
    if WIDTH != D:
        s = tl.where(feature_offsets(D)[:, :, None] < WIDTH, s, 0)
    bias = load_features(c, D)
    mean = tl.sum(tl.sum(tl.sum(bias, axis=2), axis=1), axis=0) / WIDTH
    bias = less_mean(bias, mean, D, WIDTH)
    return s, tl.broadcast_to(bias, (D // CHUNK, CHUNK, CHUNK))


@triton.jit
def load_state_before(
    segment, w0, b0, w_kept, c_kept, scan, head, segments, D: tl.constexpr, WIDTH: tl.constexpr
):
    """The state before a segment of a scan: the one kept after the last segment, or the first."""
    if segment == 0:
        s, c = load_state(w0 + head * D * D, b0 + head * D, D, WIDTH)
    else:
        slot = tl.cast(scan, tl.int64) * segments + segment - 1
        s, c = load_state(w_kept + slot * D * D, c_kept + slot * D, D, WIDTH)
    return s, c


@triton.jit
def store_state(w, c, s, bias, D: tl.constexpr):
    """The inverse of `load_state`."""
    tl.store(w + state_offsets(D), s)
    first = tl.arange(0, CHUNK)[None, :, None] == 0
    tl.store(c + feature_offsets(D), tl.sum(tl.where(first, bias, 0), axis=1))


@triton.jit
def operand(x, like):
    """`x` in the type of the tokens `like`, to be multiplied with; fp16 saturates.

    Infinity would leave a NaN behind it in every later token of the scan, at any scale of the loss.
    """
    if like.dtype == tl.float16:
        # A NaN stays one, for the loss to show it.
        x = tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(like.dtype)


@triton.jit
def query_state(s, c, x, D: tl.constexpr, PRECISION: tl.constexpr):
    """`x W + c` in blocks of features, of tokens `(16, D)`."""
    return add_product(c, every(x, D), turned(s.to(x.dtype)), PRECISION)


@triton.jit
def add_outer(s, c, x, y, D: tl.constexpr, PRECISION: tl.constexpr):
    """Adds `xᵀy` to S and `xᵀ1` to c, of tokens x in blocks and y `(16, D)`."""
    ones = tl.full((D // CHUNK, CHUNK, CHUNK), 1.0, y.dtype)
    s = add_product(s, turned(x), every(y, D), PRECISION)
    return s, add_product(c, ones, x, PRECISION)


@triton.jit
def scores(x, y, D: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """`xyᵀ` of tokens `(16, D)`, once for every block: every warp has it where it multiplies."""
    return product(every(x, D), every(tl.trans(y), D), PRECISION, ACC)


@triton.jit
def token_scales(token_scale, i_r, n, SIZE: tl.constexpr, HAS_SCALE: tl.constexpr, ACC):
    """τ `(16,)` of chunk `n`'s places in the mini-batch; ones where there is none."""
    if HAS_SCALE:
        place = places(n, SIZE)
        tau = tl.load(token_scale + i_r * SIZE + place, mask=place < SIZE, other=0.0)
    else:
        tau = tl.full((CHUNK,), 1.0, ACC)
    return tau


@triton.jit
def last_token_scale(token_scale, i_r, SIZE: tl.constexpr, HAS_SCALE: tl.constexpr, ACC):
    """τ_b, with which a mini-batch hands its steps on."""
    last = token_scale + i_r * SIZE + SIZE - 1
    return tl.load(last) if HAS_SCALE else tl.full((), 1.0, ACC)


@triton.jit
def handed_on(steps, tau_last, SIZE: tl.constexpr):
    """e of a chunk; of several to a mini-batch without τ_b, which their sum gets at its end."""
    return steps if pieces(SIZE) > 1 else tau_last * steps


@triton.jit
def step_back(g, e, k):
    """`−e⊙G`, whose outer product with the keys k changes the state: one rounding for all."""
    return operand(g * -e, k)


@triton.jit
def unit(segment, SIZE: tl.constexpr):
    """Chunks of a turn of the loop around the one over chunks.

    A mini-batch of several chunks, at whose end its steps go into the state; else a segment.
    """
    return pieces(SIZE) if pieces(SIZE) > 1 else segment


@triton.jit
def turns(first, last, SIZE: tl.constexpr):
    """Turns of that loop in a segment, from chunk `first` to before `last`."""
    return tl.cdiv(last - first, pieces(SIZE)) if pieces(SIZE) > 1 else 1
