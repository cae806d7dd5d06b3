"""Functions that the Triton kernels of several ops share: loads and stores of tokens, products."""

import triton
import triton.language as tl


@triton.jit
def share_of(splits, span, N):
    """The sum to which a program contributes, and its first token and the end of its tokens."""
    first = tl.program_id(0) % splits * span
    return tl.program_id(0) // splits, first, tl.minimum(first + span, N)


@triton.jit
def start(program, H, strides):
    """Elements from a tensor's start to the first token of an (image, head), in 64 bits.

    strides: Strides of images, tokens and heads.
    """
    return (program // H).to(tl.int64) * strides[0] + (program % H).to(tl.int64) * strides[2]


@triton.jit
def dense_start(program, N, H, D: tl.constexpr):
    """`start` of a contiguous `(B, N, H, D)`."""
    return start(program, H, (tl.cast(N, tl.int64) * H * D, H * D, D))


@triton.jit
def _pointers(base, first, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = (first + tl.arange(0, BLOCK)).to(tl.int64)
    return base + rows[:, None] * stride + tl.arange(0, D)[None, :]


@triton.jit
def load_tokens(base, first, last, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Loads tokens `(BLOCK, D)` from `first` on. Zeros from `last` on add nothing to sums."""
    inside = first + tl.arange(0, BLOCK) < last
    return tl.load(_pointers(base, first, stride, D, BLOCK), mask=inside[:, None], other=0.0)


@triton.jit
def store_tokens(base, first, last, stride, x, D: tl.constexpr, BLOCK: tl.constexpr):
    """Writes tokens `(BLOCK, D)` from `first` to before `last`."""
    inside = first + tl.arange(0, BLOCK) < last
    pointers = _pointers(base, first, stride, D, BLOCK)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def channel_pointers(base, pixels, stride, channels):
    return base + pixels.to(tl.int64)[:, None] * stride + channels[None, :]


@triton.jit
def load(base, pixels, last, stride, channels, D):
    """Loads some channels of tokens or pixels, and zeros from `last` and from D on."""
    inside = (pixels < last)[:, None] & (channels < D)[None, :]
    return tl.load(channel_pointers(base, pixels, stride, channels), mask=inside, other=0.0)


@triton.jit
def store(base, pixels, last, stride, channels, D, x):
    """Writes what `load` would read."""
    inside = (pixels < last)[:, None] & (channels < D)[None, :]
    pointers = channel_pointers(base, pixels, stride, channels)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def square(D: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a `(D, D)` tile in rows of WIDTH."""
    return tl.arange(0, D)[:, None] * WIDTH + tl.arange(0, D)[None, :]


@triton.jit
def again(w, pointers, RELOAD: tl.constexpr):
    """`w`, reloaded from the cache if RELOAD, so that no registers hold it until here.

    The barrier is for the compiler, which otherwise hoists the load out of the loop and keeps `w`.
    """
    if RELOAD:
        tl.debug_barrier()
        w = tl.load(pointers)
    return w


@triton.constexpr_function
def _in_three(x, precision):
    """True for a product of a tall matrix that takes three TF32 products.

    Triton would compile it to WGMMA with an operand in registers, which ptxas before 13.3 may
    overwrite. With fewer than 64 rows, or with a batch, it uses mma.sync.
    """
    return precision == 'tf32x3' and len(x.shape) == 2 and x.shape[0] >= 64


# A PRECISION of half types whose products are no WGMMA: Triton computes a batch by mma.sync.
MMA_SYNC = tl.constexpr('mma.sync')


@triton.jit
def dot(x, y, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """`x y`, batched if there are several matrices, accumulated in ACC."""
    if PRECISION == MMA_SYNC:
        z = _add_rows(tl.zeros((x.shape[0], y.shape[1]), ACC), x, y)
    elif _in_three(x, PRECISION):
        z = tl.dot(tl.trans(y), tl.trans(x), input_precision=PRECISION, out_dtype=ACC)
        z = tl.trans(z)
    else:
        z = tl.dot(x, y, input_precision=PRECISION, out_dtype=ACC)
    return z


@triton.jit
def add_dot(total, x, y, PRECISION: tl.constexpr):
    """`total + x y`, accumulated by the tensor cores."""
    if PRECISION == MMA_SYNC:
        z = _add_rows(total, x, y)
    elif _in_three(x, PRECISION):
        if y.shape[1] < 64:
            z = tl.trans(_add_dot(tl.trans(total), tl.trans(y), tl.trans(x), PRECISION))
        else:
            z = _add_blocks(total, x, y, PRECISION)
    else:
        z = _add_dot(total, x, y, PRECISION)
    return z


@triton.jit
def _add_rows(total, x, y):
    """`total + x y` in blocks of 16 rows, one for each of 4 warps at 64 rows."""
    ROWS: tl.constexpr = x.shape[0] // 16
    K: tl.constexpr = y.shape[0]
    N: tl.constexpr = y.shape[1]
    y = tl.broadcast_to(y[None], (ROWS, K, N))
    x, z = tl.reshape(x, (ROWS, 16, K)), tl.reshape(total, (ROWS, 16, N))
    return tl.reshape(tl.dot(x, y, z, out_dtype=total.dtype), (16 * ROWS, N))


@triton.jit
def _add_dot(total, x, y, PRECISION: tl.constexpr):
    return tl.dot(x, y, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _add_blocks(total, x, y, PRECISION: tl.constexpr):
    """`total + x y` in blocks of 16 rows and half the columns, one for each of 8 warps at 64 × 64.

    Triton distributes the batch of a batched product over the warps.
    """
    ROWS: tl.constexpr = x.shape[0] // 16
    K: tl.constexpr = y.shape[0]
    HALF: tl.constexpr = y.shape[1] // 2
    x = tl.broadcast_to(tl.reshape(x, (ROWS, 1, 16, K)), (ROWS, 2, 16, K))
    y = tl.permute(tl.reshape(y, (K, 2, HALF)), (1, 0, 2))
    y = tl.broadcast_to(y[None], (ROWS, 2, K, HALF))
    z = tl.permute(tl.reshape(total, (ROWS, 16, 2, HALF)), (0, 2, 1, 3))
    z = _add_dot(
        tl.reshape(z, (2 * ROWS, 16, HALF)),
        tl.reshape(x, (2 * ROWS, 16, K)),
        tl.reshape(y, (2 * ROWS, K, HALF)),
        PRECISION,
    )
    z = tl.permute(tl.reshape(z, (ROWS, 2, 16, HALF)), (0, 2, 1, 3))
    return tl.reshape(z, (16 * ROWS, 2 * HALF))


@triton.jit
def silu(z):
    """silu(z) and its first and second derivatives."""
    sigma = tl.sigmoid(z)
    spread = sigma * (1 - sigma)
    return z * sigma, sigma + z * spread, spread * (2 + z * (1 - 2 * sigma))
