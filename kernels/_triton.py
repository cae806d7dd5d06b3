"""Functions that the Triton kernels of several ops share: loads and stores of tokens, products."""

import triton
import triton.language as tl


@triton.jit
def start(program, H, strides):
    """Elements from a tensor's start to the first token of an (image, head), in 64 bits.

    strides: Those of images, tokens and heads.
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
    """Tokens `(BLOCK, D)` from `first` on; zeros from `last` on, which add nothing to any sum."""
    inside = first + tl.arange(0, BLOCK) < last
    return tl.load(_pointers(base, first, stride, D, BLOCK), mask=inside[:, None], other=0.0)


@triton.jit
def store_tokens(base, first, last, stride, x, D: tl.constexpr, BLOCK: tl.constexpr):
    """Writes tokens `(BLOCK, D)` from `first` to before `last`."""
    inside = first + tl.arange(0, BLOCK) < last
    pointers = _pointers(base, first, stride, D, BLOCK)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def square(D: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a `(D, D)` tile in rows of WIDTH."""
    return tl.arange(0, D)[:, None] * WIDTH + tl.arange(0, D)[None, :]


@triton.jit
def dot(x, y, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """`x y`, of every pair of matrices where there are several; sums are kept in ACC."""
    return tl.dot(x, y, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def add_dot(total, x, y, PRECISION: tl.constexpr):
    """`total + x y`, summed where the tensor cores sum."""
    return tl.dot(x, y, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def silu(z):
    """silu(z), its first and its second derivative."""
    sigma = tl.sigmoid(z)
    spread = sigma * (1 - sigma)
    return z * sigma, sigma + z * spread, spread * (2 + z * (1 - 2 * sigma))
