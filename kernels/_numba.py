"""Compiling, products, tokens and threads for numba kernels."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic as numba_intrinsic
from torch import Tensor

# Matrices are padded to multiples of this many columns.
COLUMNS = 16
# Narrowest tile of `add_product`, and terms of a step of its inner loop.
_TILE_BYTES, _STEP = 64, 4
# A transposed operand is packed this many terms at a time, in square blocks.
_PANEL_TERMS, _SQUARE = 128, 8
_BYTE, _INDEX = ir.IntType(8), ir.IntType(64)
# Parts for each thread: if another process delays a thread, the others take the rest of its parts.
_PARTS_PER_THREAD = 4
# Waking a thread takes 70 µs, in which a core does 2 million multiply-adds.
_WORTH_A_THREAD = 4_000_000
# numba's own function type counts the context among a call's arguments.
intrinsic: Callable[[Callable], Callable[..., Any]] = numba_intrinsic
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


# LLVM may reorder sums and fuse products with them, but must respect NaN and infinity. A compiled
# function always sums in one order.
_OPTIONS: dict[str, Any] = {
    'nogil': True,
    'error_model': 'numpy',
    'fastmath': {'contract', 'reassoc', 'nsz', 'arcp'},
}
# Kernels on disk are valid only for these files as they are now.
_SOURCES = sorted(Path(__file__).parent.rglob('_numba*.py'))
_STAMP = tuple((x.name, x.stat().st_mtime_ns, x.stat().st_size) for x in _SOURCES)


def jit(function: Callable) -> Callable:
    """Compiles `function` at its first call for each set of types, and keeps the result on disk.

    numba keeps it in `__pycache__` next to the source, or in the user's cache. If neither can be
    written (a full disk) or read (a truncated file), the process compiles for itself and warns.
    """
    try:
        kernel = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba: no locator available
        return numba.njit(**_OPTIONS)(function)
    # numba checks the file of `function` only; the functions that it calls are in others.
    kernel._cache._cache_file._source_stamp = _STAMP
    for step in ('load_overload', 'save_overload'):
        setattr(kernel._cache, step, partial(_or_compile, getattr(kernel._cache, step)))
    return kernel


def _or_compile(step: Callable[..., Any], *arguments: Any) -> Any:
    """A step of numba's cache; None if it fails, as for a kernel that is not in the cache."""
    try:
        return step(*arguments)
    # A truncated pickle raises errors of any type.
    except Exception as error:
        warnings.warn(
            f'numba cannot read or write compiled kernels in {step.__self__.cache_path} '
            f'({type(error).__name__}: {error}), so that this process compiles its own: make room '
            'there, delete the folder, or set NUMBA_CACHE_DIR',
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def inlined(function: Callable) -> Callable:
    """Compiles `function` to be called from other compiled functions only.

    LLVM vectorizes a loop only if 8 comparisons suffice to show that the arrays written in it
    overlap no other. So write one array in a loop, or two if there are few others.

    Inlining makes the order of sums independent of whether a caller was compiled in this process or
    loaded from disk: for a symbol the linker has a choice of two.
    """
    unwrapped = {'no_cpython_wrapper': True, 'no_cfunc_wrapper': True, 'forceinline': True}
    options: dict[str, Any] = unwrapped | _OPTIONS
    return numba.njit(**options)(function)


# ----------------------------------------------------------------------------------------- products


@intrinsic
def add_product(context, z, x, w):
    """z += x @ w, `(m, n)`, `(m, k)`, `(k, n)` of one type, multiples of COLUMNS.

    Rows of z are dense, x has any strides, w is dense or the transpose of a dense matrix. LLVM's
    loop vectorizer does not keep a tile of sums in registers, so these are its vectors. At most
    _PANEL_TERMS terms are summed before z is rounded.
    """

    def generate(context, builder, signature, arguments):
        numbers = []
        for kind, value in zip(signature.args, arguments, strict=True):
            array = context.make_array(kind)(context, builder, value)
            numbers.append(builder.bitcast(array.data, _BYTE.as_pointer()))
            numbers += cgutils.unpack_tuple(builder, array.strides)
            numbers += cgutils.unpack_tuple(builder, array.shape)
        number = context.get_data_type(signature.args[0].dtype)
        size = signature.args[0].dtype.bitwidth // 8
        turned = signature.args[2].layout == 'F'
        tile = _tile(context.codegen().magic_tuple())
        builder.call(_product_function(builder.module, number, size, turned, tile), numbers)
        return context.get_dummy_value()

    return types.void(z, x, w), generate


def _tile(target: tuple[str, str, str]) -> tuple[int, int]:
    """Rows of a tile and bytes of a row, by LLVM's (triple, processor, features).

    The sums take 8 of the 16 vector registers of AVX2, and 16 of the 32 of AVX-512.
    """
    return (8, 128) if '+avx512f' in target[2].split(',') else (4, _TILE_BYTES)


def _product_function(
    module: ir.Module, number: ir.Type, size: int, turned: bool, tile: tuple[int, int]
) -> ir.Function:
    """`add_product` of numbers of `size` bytes: address, strides, shape of z, of x and of w."""
    name = f'ttt_kernels_add_product_{size}{"_turned" * turned}'
    if name in module.globals:
        return module.globals[name]
    array = [_BYTE.as_pointer(), *[_INDEX] * 4]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), 3 * array), name)
    function.linkage = 'linkonce_odr'
    function.attributes.add('noinline')
    builder = ir.IRBuilder(function.append_basic_block())
    z, z_row, _, height, width, x, x_row, x_column, _, terms, w, w_row, w_column, *_ = function.args
    first, fuse = ir.Constant(ir.IntType(32), 0), {'flags': ('contract',)}

    def steps(start, stop, step):
        return cgutils.for_range_slice(builder, start, stop, _INDEX(step), _INDEX)

    if turned:
        line = ir.VectorType(number, tile[1] // size)
        panel = cgutils.alloca_once(builder, line, size=_PANEL_TERMS)
        panel = builder.bitcast(panel, _BYTE.as_pointer())

    def columns(left, right, row_bytes):
        """Columns of z in tiles of this width."""
        lanes = row_bytes // size
        vector = ir.VectorType(number, lanes)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        with (
            steps(left, right, lanes) as (j, _),
            steps(_INDEX(0), terms, _PANEL_TERMS) as (begin, _),
        ):
            end = builder.add(begin, _INDEX(_PANEL_TERMS))
            end = builder.select(builder.icmp_signed('<', end, terms), end, terms)
            if turned:
                line = _INDEX(row_bytes)
                with steps(begin, end, _SQUARE) as (term, _):
                    for part in range(0, lanes, _SQUARE):
                        row = builder.mul(builder.add(j, _INDEX(part)), w_column)
                        source = builder.gep(w, [builder.add(row, builder.mul(term, w_row))])
                        row = builder.mul(builder.sub(term, begin), line)
                        target = builder.gep(panel, [builder.add(row, _INDEX(part * size))])
                        _turn_square(builder, number, size, source, w_column, target, line)
                weights, weights_row = panel, line
            else:
                start = builder.add(builder.mul(begin, w_row), builder.mul(j, w_column))
                weights, weights_row = builder.gep(w, [start]), w_row
            with steps(_INDEX(0), height, tile[0]) as (i, _):
                rows = [builder.add(i, _INDEX(r)) for r in range(tile[0])]
                shift = builder.mul(j, _INDEX(size))
                places = [
                    _at(builder, vector, z, builder.add(builder.mul(r, z_row), shift)) for r in rows
                ]
                starts = [builder.mul(r, x_row) for r in rows]
                sums = [cgutils.alloca_once(builder, vector) for _ in rows]
                for total in sums:
                    builder.store(ir.Constant(vector, [0.0] * lanes), total)
                with steps(begin, end, _STEP) as (first_term, _):
                    for more in range(_STEP):
                        term = builder.add(first_term, _INDEX(more))
                        row = builder.mul(builder.sub(term, begin), weights_row)
                        b = builder.load(_at(builder, vector, weights, row), align=size)
                        shift = builder.mul(term, x_column)
                        for start, total in zip(starts, sums, strict=True):
                            place = _at(builder, number, x, builder.add(start, shift))
                            a = builder.load(place, align=size)
                            a = builder.insert_element(undefined, a, first)
                            a = builder.shuffle_vector(a, undefined, everywhere)
                            a = builder.fmul(a, b, **fuse)
                            builder.store(builder.fadd(builder.load(total), a, **fuse), total)
                for place, total in zip(places, sums, strict=True):
                    total = builder.fadd(builder.load(place, align=size), builder.load(total))
                    builder.store(total, place, align=size)

    # A width is a multiple of COLUMNS; a wide tile has two of them.
    full = builder.and_(width, _INDEX(-(tile[1] // size)))
    columns(_INDEX(0), full, tile[1])
    if tile[1] > COLUMNS * size:
        columns(full, width, _TILE_BYTES)
    builder.ret_void()
    return function


def _turn_square(
    builder: ir.IRBuilder,
    number: ir.Type,
    size: int,
    source: ir.Value,
    source_row: ir.Value,
    target: ir.Value,
    target_row: ir.Value,
) -> None:
    """Writes the transpose of a square of _SQUARE × _SQUARE numbers with the given row strides."""
    vector = ir.VectorType(number, _SQUARE)

    def at(start, row, step):
        return _at(builder, vector, start, builder.mul(_INDEX(row), step))

    rows = [builder.load(at(source, r, source_row), align=size) for r in range(_SQUARE)]
    side = _SQUARE // 2
    while side:
        # Swaps the two off-diagonal squares of `side` in every square of twice the side.
        lanes = range(_SQUARE)
        upper = [i if not i & side else i + _SQUARE - side for i in lanes]
        lower = [i + side if not i & side else i + _SQUARE for i in lanes]
        upper, lower = (
            ir.Constant(ir.VectorType(ir.IntType(32), _SQUARE), m) for m in (upper, lower)
        )
        for r in lanes:
            if not r & side:
                a, b = rows[r], rows[r + side]
                rows[r] = builder.shuffle_vector(a, b, upper)
                rows[r + side] = builder.shuffle_vector(a, b, lower)
        side //= 2
    for r, row in enumerate(rows):
        builder.store(row, at(target, r, target_row), align=size)


def _at(builder: ir.IRBuilder, kind: ir.Type, start: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())


# ------------------------------------------------------------------------------------------- tokens


@inlined
def clear(x, first):
    """Sets the rows of `x` from `first` on to zero."""
    for t in range(first, len(x)):
        row = x[t]
        for i in range(len(row)):
            row[i] = 0


@inlined
def round_to_bf16(x, count, dim):
    """Rounds `count` rows of fp32 numbers to bf16, ties to even."""
    for t in range(count):
        bits = x[t].view(np.uint32)
        for i in range(dim):
            bits[i] = (bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) & 0xFFFF0000


@inlined
def add(total, x):
    """total += x for matrices of one shape."""
    for t in range(len(x)):
        row, line = total[t], x[t]
        for i in range(len(line)):
            row[i] += line[i]


@inlined
def load(out, x, place, first, count, dim):
    """Loads `count` tokens of `x` from `first` on; sets the rows below them to zero.

    `place`: offset of the first token in `x`, whose memory is one row, and the stride to the next.
    """
    start, step = place[0] + first * place[1], place[1]
    for t in range(count):
        row, line = out[t], x[start + t * step : start + t * step + dim]
        for i in range(dim):
            row[i] = line[i]
    clear(out, count)


@inlined
def store(x, out, place, first, count, dim):
    """Stores the tokens of a chunk where `load` reads them."""
    start, step = place[0] + first * place[1], place[1]
    for t in range(count):
        row, line = x[t], out[start + t * step : start + t * step + dim]
        for i in range(dim):
            line[i] = row[i]


def flat(*tensors: Tensor, dtype: torch.dtype, lead: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Memory of every tensor as one row, and its first `lead` strides; features are dense."""
    rows, strides = [], []
    for x in tensors:
        x = x.detach()
        if x.dtype is not dtype:
            x = x.to(dtype)
        steps = x.stride()
        if len(steps) > lead and steps[-1] != 1:
            x = x.contiguous()
            steps = x.stride()
        last = sum((n - 1) * s for n, s in zip(x.shape, steps, strict=True))
        span = last + 1 if x.numel() else 0
        rows.append(x.as_strided((span,), (1,)).numpy())
        strides.append(steps[:lead])
    return rows, np.array(strides)


def sum_in_order(x: Tensor) -> Tensor:
    """Sums over the images in order: torch's own sum depends on the number of threads."""
    return sum(x.unbind(0), start=x.new_zeros(x.shape[1:]))


def padded(size: int) -> int:
    """`size` rounded up to a multiple of COLUMNS."""
    return -(-size // COLUMNS) * COLUMNS


# ------------------------------------------------------------------------------------------ threads


def parallel(kernel: Callable, count: int, work: int, *args: Any) -> None:
    """Calls `kernel(start, stop, *args)` on parts of `range(count)`, on torch's threads.

    `work` is in multiply-adds: little of it takes fewer threads. Which thread takes which part is
    undetermined, so a result must not depend on where its part begins.

    torch's threads spin between its operations and would compete with those of another pool, so
    these come from the OpenMP library that torch has loaded.
    """
    threads = min(torch.get_num_threads(), count, work // _WORTH_A_THREAD)
    if threads <= 1 or _start_team is None:
        kernel(0, count, *args)
        return
    number = min(count, _PARTS_PER_THREAD * threads)
    bounds = [count * i // number for i in range(number + 1)]
    parts = pairwise(bounds)
    errors = []

    def take_parts(_: int | None) -> None:
        try:
            while part := next(parts, None):
                kernel(*part, *args)
        except BaseException as error:  # ctypes would print the exception and continue
            errors.append(error)

    _start_team(_CALLBACK(take_parts), None, threads, 0)
    if errors:
        raise errors[0]


_start_team: Callable | None
try:
    _start_team = ctypes.CDLL(None).GOMP_parallel
except (AttributeError, OSError, TypeError):  # no OpenMP, or one without GNU's entry points
    _start_team = None
