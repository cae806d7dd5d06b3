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
    """Compiles `function` for other compiled functions alone.

    A loop runs in vectors where LLVM needs at most 8 comparisons to know that no array written in
    it overlaps another one of it. So: one array written in a loop, or two beside few others.
    """
    unwrapped = {'no_cpython_wrapper': True, 'no_cfunc_wrapper': True}
    return numba.njit(**unwrapped, **_OPTIONS)(function)


# ----------------------------------------------------------------------------------------- products


@intrinsic
def add_product(context, z, x, w):
    """z += x @ w, `(m, n)`, `(m, k)`, `(k, n)` of one type; rows of z and w dense, x any strides.

    m and k must be multiples of ROWS, n of COLUMNS. Written in LLVM's vectors, because its loop
    vectorizer does not keep a tile of sums in registers; near the speed of a BLAS.
    """

    def generate(context, builder, signature, arguments):
        numbers = []
        for kind, value in zip(signature.args, arguments, strict=True):
            array = context.make_array(kind)(context, builder, value)
            numbers.append(builder.bitcast(array.data, ir.IntType(8).as_pointer()))
            numbers += cgutils.unpack_tuple(builder, array.strides)
            numbers += cgutils.unpack_tuple(builder, array.shape)
        number = context.get_data_type(signature.args[0].dtype)
        size = signature.args[0].dtype.bitwidth // 8
        builder.call(_product_function(builder.module, number, size), numbers)
        return context.get_dummy_value()

    return types.void(z, x, w), generate


def _product_function(module: ir.Module, number: ir.Type, size: int) -> ir.Function:
    """`add_product` of numbers of `size` bytes: address, strides, shape of z, of x and of w."""
    name, index, byte = f'ttt_kernels_add_product_{size}', ir.IntType(64), ir.IntType(8)
    array = [byte.as_pointer(), *[index] * 4]
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), 3 * array), name)
    function.linkage = 'linkonce_odr'
    function.attributes.add('noinline')
    builder = ir.IRBuilder(function.append_basic_block())
    z, z_row, _, height, width, x, x_row, x_column, _, terms, w, w_row, *_ = function.args
    lanes = _TILE_BYTES // size
    vector = ir.VectorType(number, lanes)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    undefined, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    fuse = {'flags': ('contract',)}

    def at(kind, start, offset):
        return builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())

    def steps(stop, step):
        return cgutils.for_range_slice(builder, index(0), stop, index(step), index)

    with steps(width, lanes) as (j, _), steps(height, ROWS) as (i, _):
        column = builder.mul(j, index(size))
        rows = [builder.add(i, index(r)) for r in range(ROWS)]
        places = [at(vector, z, builder.add(builder.mul(r, z_row), column)) for r in rows]
        starts = [builder.mul(r, x_row) for r in rows]
        sums = [cgutils.alloca_once_value(builder, builder.load(p, align=size)) for p in places]
        with steps(terms, ROWS) as (first_term, _):
            for more in range(ROWS):
                term = builder.add(first_term, index(more))
                row = builder.add(builder.mul(term, w_row), column)
                b = builder.load(at(vector, w, row), align=size)
                shift = builder.mul(term, x_column)
                for start, total in zip(starts, sums, strict=True):
                    a = builder.load(at(number, x, builder.add(start, shift)), align=size)
                    a = builder.insert_element(undefined, a, first)
                    a = builder.fmul(builder.shuffle_vector(a, undefined, everywhere), b, **fuse)
                    builder.store(builder.fadd(builder.load(total), a, **fuse), total)
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place, align=size)
    builder.ret_void()
    return function


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
