"""What kernels in numba share: compiling, a product of matrices that fit the cache, threads."""

import ctypes
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numba
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Matrices of `add_product` are padded to multiples of these: tiles of 4 rows by 64 bytes, whose
# sums take 8 of the 16 vector registers of AVX2.
ROWS, COLUMNS = 4, 16
_TILE_BYTES = 64
# A thread that is held up by another process leaves the rest of its share to the others.
_PARTS_PER_THREAD = 4
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


# Sums may be taken in another order and products be fused with sums, but NaN and infinity count,
# and a compiled function takes one order always.
_OPTIONS = {
    'nogil': True,
    'error_model': 'numpy',
    'fastmath': {'contract', 'reassoc', 'nsz', 'arcp'},
}


def jit(function: Callable) -> Callable:
    """Compiles `function` at its first call for each set of types, and keeps the result on disk.

    It is kept in `__pycache__` beside the source or, where that cannot be written (a read-only
    installation), in the user's cache (NUMBA_CACHE_DIR, else ~/.cache/numba or its like). Where
    there is no such place either, every process compiles anew. numba looks at the time of the file
    of `function` alone: whoever changes a `part` in another file deletes what is kept.
    """
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba: no locator available
        return numba.njit(**_OPTIONS)(function)


def part(function: Callable) -> Callable:
    """Compiles `function` for other compiled functions alone, which is faster done."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)


# ----------------------------------------------------------------------------------------- products


@intrinsic
def _add_tile(context, z, i, j, x, w):
    """z[i:i+4, j:j+n] += x[i:i+4] @ w[:, j:j+n], n numbers being 64 bytes; z and w have dense rows.

    Said in vectors, because LLVM's loop vectorizer does not keep a tile of sums in registers.
    """
    size = z.dtype.bitwidth // 8
    lanes = _TILE_BYTES // size

    def generate(context, builder, signature, arguments):
        z, i, j, x, w = arguments
        number = context.get_data_type(signature.args[0].dtype)
        vector, index = ir.VectorType(number, lanes), ir.IntType(64)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        fuse = {'flags': ('contract',)}

        def array(kind, value):
            """Address, strides in bytes and shape."""
            struct = context.make_array(kind)(context, builder, value)
            start = builder.bitcast(struct.data, ir.IntType(8).as_pointer())
            strides = cgutils.unpack_tuple(builder, struct.strides)
            return start, strides, cgutils.unpack_tuple(builder, struct.shape)

        def at(kind, start, offset):
            return builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())

        z, (z_row, _), _ = array(signature.args[0], z)
        x, (x_row, x_column), (_, terms) = array(signature.args[3], x)
        w, (w_row, _), _ = array(signature.args[4], w)
        column = builder.mul(j, ir.Constant(index, size))
        rows = [builder.add(i, ir.Constant(index, r)) for r in range(ROWS)]
        places = [at(vector, z, builder.add(builder.mul(r, z_row), column)) for r in rows]
        starts = [builder.mul(r, x_row) for r in rows]
        sums = [cgutils.alloca_once_value(builder, builder.load(p, align=size)) for p in places]
        with cgutils.for_range(builder, terms) as loop:
            row = builder.add(builder.mul(loop.index, w_row), column)
            b = builder.load(at(vector, w, row), align=size)
            shift = builder.mul(loop.index, x_column)
            for start, total in zip(starts, sums, strict=True):
                a = builder.load(at(number, x, builder.add(start, shift)), align=size)
                a = builder.insert_element(undefined, a, ir.Constant(ir.IntType(32), 0))
                a = builder.shuffle_vector(a, undefined, everywhere)
                more = builder.fadd(builder.load(total), builder.fmul(a, b, **fuse), **fuse)
                builder.store(more, total)
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place, align=size)
        return context.get_dummy_value()

    return types.void(z, types.intp, types.intp, x, w), generate


@part
def add_product(z, x, w):
    """z += x @ w, `(m, n)`, `(m, k)`, `(k, n)` of one type; rows of z and w dense, x any strides.

    m must be a multiple of ROWS and n of COLUMNS.
    """
    lanes = _TILE_BYTES // z.itemsize
    for j in range(0, z.shape[1], lanes):
        for i in range(0, z.shape[0], ROWS):
            _add_tile(z, i, j, x, w)


def padded(size: int, multiple: int) -> int:
    """The next multiple of `multiple` that holds `size`."""
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------------------------ threads


def parallel(kernel: Callable, count: int, *args: Any) -> None:
    """Calls `kernel(start, stop, *args)` on parts of `range(count)`, on torch's threads.

    They are `torch.get_num_threads()`; which of them takes which part is left to chance, so a
    kernel must do the same wherever its part begins, and no two items may write to one place.

    torch's threads wait for its next operation without sleeping: others would share cores with
    them. So these are the same ones, from the OpenMP library that torch has loaded. Without one
    (or with one that does not speak GNU's dialect) the calling thread does everything.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1 or _start_team is None:
        if count:
            kernel(0, count, *args)
        return
    number = min(count, _PARTS_PER_THREAD * threads)
    bounds = [count * i // number for i in range(number + 1)]
    parts = deque(pairwise(bounds))
    errors = []

    def work(_: int | None) -> None:
        try:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    return
                kernel(*part, *args)
        except BaseException as error:  # ctypes would print it and go on
            errors.append(error)

    _start_team(_CALLBACK(work), None, threads, 0)
    if errors:
        raise errors[0]


def _find_start_team() -> Callable | None:
    """`GOMP_parallel` of the library that torch has loaded into the process, if there is one."""
    try:
        return ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None


_start_team = _find_start_team()
