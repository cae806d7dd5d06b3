"""Functions that the TTT-linear kernels share: addresses of tokens, the state, products.

A chunk is a mini-batch of SIZE = b ≤ 16 tokens, padded with zero tokens to 16, as at the end of a
scan.

Tokens are loaded as tiles `(16, d)`, as in the formulas, and multiplied as `(d/16, 16, 16)`, tokens
in rows, d/16 blocks of 16 features: one warp for each block, as Triton distributes the batch of a
batched product over the warps. The state is kept as `S = Wᵀ`, in blocks of 16 output features,
`(d/16, 16, d)`. So no warp repeats another's work, as all would with the 16 rows of `K W`; a block
of S goes from accumulator to operand within its registers; a sum over features takes two exchanges
in a warp and one between warps, for sixteen tokens at once; and Triton never uses WGMMA, which
ptxas miscompiles if its operand is in registers (README.md, "The kernels").
"""

import os

import triton
import triton.language as tl

from .._triton import add_dot, dot

# Rows of a tile of tokens: the depth of one tensor-core instruction in half precision.
CHUNK = tl.constexpr(16)
# Slots of a chunk's tiles and rows in the buffers between the backward kernels, (scans, chunks,
# TILES, 16, D) and (scans, chunks, ROWS, 16): one address for all. The chain reads U and X before
# it writes dP and dZ.
TILES = tl.constexpr(5)
TILE_D, TILE_U, TILE_X = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TILE_G, TILE_SLOPE = tl.constexpr(3), tl.constexpr(4)
TILE_DP, TILE_DZ = TILE_U, TILE_X
ROWS = tl.constexpr(4)
ROW_RSTD, ROW_MEAN_PX = tl.constexpr(0), tl.constexpr(1)
ROW_DETA, ROW_DLAST = tl.constexpr(2), tl.constexpr(3)
# Integers that vary from call to call: no recompilation for values of 1 or multiples of 16. (Floats
# are never specialised.) Names that a kernel lacks are ignored.
VARYING = ('B', 'T', 'R', 'H', 'reverse_mask', 'segment', 'segments')
# Triton's interpreter reduces several tensors at once one number at a time, in Python.
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET', '0') == '1')


@triton.jit
def scan_of(x, strides, scan, T, R, H, reverse_mask):
    """`x` moved to a scan's first token, and elements from one token to the next.

    In 64 bits throughout: `B·T·R·H·d` passes 2³¹ long before a GPU's memory is full.

    strides: Strides of images, tokens, scans and heads.
    """
    i_h = scan % H
    i_r = (scan // H) % R
    i_b = scan // (H * R)
    step = tl.cast(strides[1], tl.int64)
    start = tl.cast(i_b, tl.int64) * strides[0] + tl.cast(i_r, tl.int64) * strides[2]
    start += tl.cast(i_h, tl.int64) * strides[3]
    reverse = ((reverse_mask >> i_r) & 1).to(tl.int64)
    start += reverse * (T - 1) * step
    return x + start, step * (1 - 2 * reverse)


@triton.jit
def dense_scan_of(x, WIDTH: tl.constexpr, scan, T, R, H, reverse_mask):
    """`scan_of` a contiguous `(B, T, R, H, WIDTH)`."""
    row = R * H * WIDTH
    strides = (tl.cast(T, tl.int64) * row, row, H * WIDTH, WIDTH)
    return scan_of(x, strides, scan, T, R, H, reverse_mask)


@triton.jit
def token_mask(n, T, SIZE: tl.constexpr):
    """Mask `(16,)` of the rows of chunk `n` that hold a token."""
    rows = tl.arange(0, CHUNK)
    inside = n * SIZE + rows < T
    if SIZE < CHUNK:
        inside = inside & (rows < SIZE)
    return inside


@triton.jit
def tile_pointers(base, step, n, D: tl.constexpr, SIZE: tl.constexpr):
    """Pointers `(16, D)` to the tokens of chunk `n`; `base` is at the scan's first token."""
    inside = tl.arange(0, CHUNK)[:, None] * step.to(tl.int32) + tl.arange(0, D)[None, :]
    return base + tl.cast(n, tl.int64) * SIZE * step + inside


@triton.jit
def load_tile(base, step, n, T, D: tl.constexpr, SIZE: tl.constexpr):
    """Tokens of chunk `n`, `(16, D)`; zeros where there is none."""
    inside = token_mask(n, T, SIZE)
    return tl.load(tile_pointers(base, step, n, D, SIZE), mask=inside[:, None], other=0.0)


@triton.jit
def store_tile(base, step, n, T, tile, D: tl.constexpr, SIZE: tl.constexpr):
    """Writes the tokens of chunk `n`, and nothing where there is none."""
    inside = token_mask(n, T, SIZE)
    pointers = tile_pointers(base, step, n, D, SIZE)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def row_pointers(base, step, n, SIZE: tl.constexpr):
    """Pointers `(16,)` to one number a token."""
    inside = tl.arange(0, CHUNK) * step.to(tl.int32)
    return base + tl.cast(n, tl.int64) * SIZE * step + inside


@triton.jit
def load_rows(base, step, n, T, SIZE: tl.constexpr):
    """One number a token of chunk `n`, `(16,)`; zero where there is none.

    A step ℓ of zero makes a ragged tail equal to a shorter mini-batch.
    """
    inside = token_mask(n, T, SIZE)
    return tl.load(row_pointers(base, step, n, SIZE), mask=inside, other=0.0)


@triton.jit
def scratch_of(scratch, scan, chunks, D: tl.constexpr):
    """A scan's part of the buffers `(scans, chunks, TILES, 16·D)` and `(scans, chunks, ROWS, 16)`.

    In the order of the scan and in whole chunks: no stride is a variable, and nothing is masked.
    """
    start = tl.cast(scan, tl.int64) * chunks * CHUNK
    return scratch[0] + start * (TILES * D), scratch[1] + start * ROWS


@triton.jit
def parts_of(parts, segments, D: tl.constexpr):
    """Parts of dln_weight and of dtoken_scale, states, and parts of dw0, in one buffer.

    For all segments `(2, 2, segments, D)`, first dln_weight and then dln_bias, from the queries and
    from the keys, `(segments, b)`, and W after each with its gradient `(segments, 2, D, D)`. For
    all scans `(scans, D + 1, D)`, with a last row for db0.
    """
    segments = tl.cast(segments, tl.int64)
    dtoken_scale = parts + segments * (4 * D)
    states = dtoken_scale + segments * CHUNK
    return parts, dtoken_scale, states, states + segments * (2 * D * D)


@triton.jit
def scratch_tile(tiles, n, place: tl.constexpr, D: tl.constexpr):
    """Pointers `(16·D,)` to a tile of chunk `n`; `tiles` is at the scan.

    The slot is added last, so that it becomes an immediate offset of the instruction.
    """
    inside = tl.arange(0, CHUNK * D)
    return tiles + n * (TILES * CHUNK * D) + inside + place * (CHUNK * D)


@triton.jit
def scratch_rows(rows, n, place: tl.constexpr):
    """Pointers `(16,)` to one number a token of chunk `n`; `rows` is at the scan."""
    return rows + n * (ROWS * CHUNK) + tl.arange(0, CHUNK) + place * CHUNK


@triton.jit
def to_scratch(z, D: tl.constexpr):
    """Values of a `(D/16, 16, 16)` in the order of the tensor cores' accumulators, `(16·D,)`.

    A thread has two tokens and four features of a block of a product. Stored contiguously they take
    one store, and one load where the next kernel adds to products, without an exchange between
    threads.
    """
    z = tl.reshape(z, (D // CHUNK, 2, 8, 2, 4, 2))
    return tl.reshape(tl.permute(z, (0, 2, 4, 3, 1, 5)), (CHUNK * D,))


@triton.jit
def from_scratch(z, D: tl.constexpr):
    """Undoes `to_scratch`."""
    z = tl.reshape(z, (D // CHUNK, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(z, (0, 4, 1, 3, 2, 5)), (D // CHUNK, CHUNK, CHUNK))


@triton.jit
def split_features(x, D: tl.constexpr):
    """Splits a `(16, D)` tile of tokens into blocks of features: `(D/16, 16, 16)`."""
    return tl.permute(tl.reshape(x, (CHUNK, D // CHUNK, CHUNK)), (1, 0, 2))


@triton.jit
def concat_features(z, D: tl.constexpr):
    """Undoes `split_features`."""
    return tl.reshape(tl.permute(z, (1, 0, 2)), (CHUNK, D))


@triton.jit
def transpose(x):
    """Transposes every block."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def split_inputs(s, D: tl.constexpr):
    """Splits S `(D/16, 16, D)` into blocks of input features, outputs in rows: `(D/16, D, 16)`."""
    return tl.permute(tl.reshape(s, (D, D // CHUNK, CHUNK)), (1, 0, 2))


@triton.jit
def repeat_blocks(x, D: tl.constexpr):
    """Repeats a matrix for every block: `(D/16, …)`."""
    return tl.broadcast_to(x[None, :, :], (D // CHUNK, x.shape[0], x.shape[1]))


@triton.jit
def column(x):
    """Shapes one number a token `(16,)` to broadcast over `(D/16, 16, 16)`."""
    return x[None, :, None]


@triton.jit
def sum_features(a):
    """Sum over the features of a `(D/16, 16, 16)`: `(16,)`."""
    return tl.sum(tl.sum(a, axis=2), axis=0)


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def sum_features2(a, b):
    """`sum_features` of two tensors, in one exchange between the warps."""
    if INTERPRETED:
        a, b = sum_features(a), sum_features(b)
    else:
        a, b = tl.reduce((a, b), 2, _add2)
        a, b = tl.reduce((a, b), 0, _add2)
    return a, b


@triton.jit
def sum_features3(a, b, c):
    """`sum_features` of three tensors, in one exchange between the warps."""
    if INTERPRETED:
        a, b, c = sum_features(a), sum_features(b), sum_features(c)
    else:
        a, b, c = tl.reduce((a, b, c), 2, _add3)
        a, b, c = tl.reduce((a, b, c), 0, _add3)
    return a, b, c


@triton.jit
def sum_features4(a, b, c, d):
    """`sum_features` of four tensors, in one exchange between the warps."""
    if INTERPRETED:
        a, b, c, d = sum_features(a), sum_features(b), sum_features(c), sum_features(d)
    else:
        a, b, c, d = tl.reduce((a, b, c, d), 2, _add4)
        a, b, c, d = tl.reduce((a, b, c, d), 0, _add4)
    return a, b, c, d


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
def subtract_mean(x, mean, D: tl.constexpr, WIDTH: tl.constexpr):
    """`x − mean` in blocks of features; features from WIDTH on stay zero."""
    x -= mean
    if WIDTH != D:
        x = tl.where(feature_offsets(D)[:, None, :] < WIDTH, x, 0)
    return x


@triton.jit
def normalized(z, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """X = Z/σ of a chunk in blocks, and 1/σ to broadcast over it. Z has no mean (`load_state`)."""
    rstd = column(tl.rsqrt(sum_features(z * z) / WIDTH + eps))
    return z * rstd, rstd


@triton.jit
def load_state(w, c, D: tl.constexpr, WIDTH: tl.constexpr):
    """S `(D/16, 16, D)`, and the bias state in every row of a `(D/16, 16, 16)`, without their mean.

    Repeated in every row, the bias initialises the tensor cores' accumulators, and its update is
    one more product; as a vector it would cost an addition and a reduction over tokens in every
    chunk.

    LayerNorm ignores a mean over the outputs, and updates have none (`inner_gradient`). Without it
    the mean of Z is a rounding error, and its variance one sum.
    """
    s = tl.load(w + state_offsets(D))
    s -= (tl.sum(tl.sum(s, axis=1), axis=0) / WIDTH)[None, None, :]
    if WIDTH != D:
        s = tl.where(feature_offsets(D)[:, :, None] < WIDTH, s, 0)
    bias = load_features(c, D)
    mean = tl.sum(tl.sum(tl.sum(bias, axis=2), axis=1), axis=0) / WIDTH
    bias = subtract_mean(bias, mean, D, WIDTH)
    return s, tl.broadcast_to(bias, (D // CHUNK, CHUNK, CHUNK))


@triton.jit
def load_state_before(
    segment, w0, b0, w_kept, c_kept, scan, head, segments, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Loads the state before a segment of a scan: the initial or a saved one."""
    if segment == 0:
        s, c = load_state(w0 + head * D * D, b0 + head * D, D, WIDTH)
    else:
        slot = tl.cast(scan, tl.int64) * segments + segment - 1
        s, c = load_state(w_kept + slot * D * D, c_kept + slot * D, D, WIDTH)
    return s, c


@triton.jit
def store_state(w, c, s, bias, D: tl.constexpr):
    """Undoes `load_state`."""
    tl.store(w + state_offsets(D), s)
    first = tl.arange(0, CHUNK)[None, :, None] == 0
    tl.store(c + feature_offsets(D), tl.sum(tl.where(first, bias, 0), axis=1))


@triton.jit
def saturating_cast(x, like):
    """`x` as an operand, in the type of the tokens `like`; fp16 saturates.

    Infinity would make every later token of the scan NaN, at any loss scale.
    """
    if like.dtype == tl.float16:
        # A NaN stays NaN, so that the loss shows it.
        x = tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(like.dtype)


@triton.jit
def kept_cast(z, like):
    """Z as saved for tokens `like`: in their type, except fp16, whose range it exceeds."""
    if like.dtype != tl.float16:
        z = z.to(like.dtype)
    return z


@triton.jit
def apply_state(s, c, x, D: tl.constexpr, PRECISION: tl.constexpr):
    """`x W + c` in blocks of features, of tokens `(16, D)`."""
    return add_dot(c, repeat_blocks(x, D), transpose(s.to(x.dtype)), PRECISION)


@triton.jit
def add_outer(s, c, x, y, D: tl.constexpr, PRECISION: tl.constexpr):
    """Adds `xᵀy` to S and `xᵀ1` to c, of tokens x in blocks and y `(16, D)`."""
    ones = tl.full((D // CHUNK, CHUNK, CHUNK), 1.0, y.dtype)
    s = add_dot(s, transpose(x), repeat_blocks(y, D), PRECISION)
    return s, add_dot(c, ones, x, PRECISION)


@triton.jit
def scores(x, y, D: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """`xyᵀ` of tokens `(16, D)`, computed for every block, so that each warp has its own copy."""
    return dot(repeat_blocks(x, D), repeat_blocks(tl.trans(y), D), ACC, PRECISION)


@triton.jit
def token_scales(token_scale, i_r, SIZE: tl.constexpr, HAS_SCALE: tl.constexpr, ACC):
    """τ `(16,)` by the place in a mini-batch, and τ_b; ones where there is no token_scale."""
    if HAS_SCALE:
        place = tl.arange(0, CHUNK)
        tau = tl.load(token_scale + i_r * SIZE + place, mask=place < SIZE, other=0.0)
        last = tl.load(token_scale + i_r * SIZE + SIZE - 1)
    else:
        tau, last = tl.full((CHUNK,), 1.0, ACC), tl.full((), 1.0, ACC)
    return tau, last


@triton.jit
def descent_step(g, e):
    """`−e⊙G` of a rounded G; its outer product with the keys is added to the state.

    All kernels take the rounded G, so that the key side steps back exactly what the query side did.
    """
    return saturating_cast(g.to(e.dtype) * -e, g)
