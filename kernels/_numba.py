"""Compiling, products, tokens and threads for numba kernels."""

from __future__ import annotations

import ctypes
import logging
import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.core.callconv import excinfo_t
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import overload
from torch import Tensor

# Matrices are padded to multiples of this many columns.
COLUMNS = 16
# Rows of a tile, as many as registers hold, and terms of a step of the inner loop of `add_product`.
ROWS, _TERMS = (8 if get_host_cpu_features().get('avx512f') else 4), 4
# Parts for each thread: if another process delays a thread, the others take the rest of its parts.
_PARTS_PER_THREAD = 4
# Starting a team takes 5 µs while torch's threads spin, and 100 µs when they sleep; in 15 µs a core
# does a million multiply-adds.
_WORTH_A_THREAD = 1_000_000
# numba's own function type counts the context among a call's arguments.
intrinsic: Callable[[Callable], Callable[..., Any]] = numba_intrinsic


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
    """A step of numba's cache, or None if it fails, as for a kernel that is not in the cache."""
    try:
        result = step(*arguments)
        if result is None and step.__name__ == 'load_overload':
            _announce()
        return result
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


@cache
def _announce() -> None:
    """Says that kernels are compiled, once in a process, before the seconds of silence."""
    logging.getLogger(__package__).warning(
        'numba compiles the kernels for this CPU, for some 20 s; later runs load them from disk'
    )


def inlined(function: Callable) -> Callable:
    """Compiles `function` to be called from other compiled functions only.

    LLVM vectorizes a loop only if 8 comparisons suffice to show that the arrays written in it
    overlap no other. So write one array in a loop, or two if there are few others.

    Inlining makes the order of sums independent of whether a caller was compiled in this process or
    loaded from disk: for a symbol the linker has a choice of two.
    """
    unwrapped = {'no_cpython_wrapper': True, 'no_cfunc_wrapper': True, 'forceinline': True}
    return numba.njit(**_OPTIONS | unwrapped)(function)


# ----------------------------------------------------------------------------------------- products


def _tiles(filtered: bool) -> Callable[..., Any]:
    @intrinsic
    def add_tile(context, z, x, w, first, left):
        """z += x @ w, or filtered, for ROWS rows from `first` and COLUMNS columns from `left`.

        LLVM's loop vectorizer does not keep a tile of sums in registers, so these are its vectors.
        """

        def generate(context, builder, signature, arguments):
            *operands, first, left = arguments
            kinds = z, x, w
            arrays = [
                context.make_array(kind)(context, builder, array)
                for kind, array in zip(kinds, operands, strict=True)
            ]
            number = context.get_data_type(z.dtype)
            line, fuse = ir.VectorType(number, COLUMNS), {'flags': ('contract',)}
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), COLUMNS), None)
            align = z.dtype.bitwidth // 8

            def at(operand, row, column, kind):
                array, indices = arrays[operand], [row, column]
                pointer = cgutils.get_item_pointer(context, builder, kinds[operand], array, indices)
                return builder.bitcast(pointer, kind.as_pointer())

            def shifted(start, stop):
                return [builder.add(start, ir.Constant(start.type, i)) for i in range(stop)]

            rows = shifted(first, ROWS)
            sums = [cgutils.alloca_once(builder, line) for _ in rows]
            for total in sums:
                builder.store(ir.Constant(line, None), total)
            terms, together = builder.extract_value(arrays[2].shape, 0), 1 if filtered else _TERMS
            begin, step = (ir.Constant(terms.type, i) for i in (0, together))
            with cgutils.for_range_slice(builder, begin, terms, step) as (start, _):
                for term in shifted(start, together):
                    b = builder.load(at(2, term, left, line), align=align)
                    for row, total in zip(rows, sums, strict=True):
                        if filtered:
                            a = at(1, builder.add(row, term), left, line)
                            a = builder.load(a, align=align)
                        else:
                            a = builder.load(at(1, row, term, number), align=align)
                            a = builder.insert_element(ir.Constant(line, ir.Undefined), a, begin)
                            a = builder.shuffle_vector(a, a, everywhere)
                        a = builder.fmul(a, b, **fuse)
                        builder.store(builder.fadd(builder.load(total), a, **fuse), total)
            for row, total in zip(rows, sums, strict=True):
                target = at(0, row, left, line)
                total = builder.fadd(builder.load(target, align=align), builder.load(total))
                builder.store(total, target, align=align)
            return context.get_dummy_value()

        return types.void(z, x, w, first, left), generate

    return add_tile


_add_tile, _add_filtered_tile = _tiles(filtered=False), _tiles(filtered=True)


@inlined
def add_product(z, x, w):
    """z += x @ w, `(m, n)`, `(m, k)`, `(k, n)` of one type, multiples of COLUMNS.

    Rows of z and w are dense, x has any strides: `np.ascontiguousarray` transposes a w.
    """
    for left in range(0, z.shape[1], COLUMNS):
        for first in range(0, len(z), ROWS):
            _add_tile(z, x, w, first, left)


@inlined
def add_filtered(z, x, y):
    """z[t] += Σ_n x[t + n]·y[n] in each column, `(m, d)`, `(m + n − 1, d)`, `(n, d)`, dense rows.

    m is a multiple of ROWS, d of COLUMNS.
    """
    for left in range(0, z.shape[1], COLUMNS):
        for first in range(0, len(z), ROWS):
            _add_filtered_tile(z, x, y, first, left)


# ------------------------------------------------------------------------------------- inner steps


def sigmoid(x):
    """1/(1 + exp(−x)) of a number in a compiled loop."""
    raise NotImplementedError


# Without `reassoc`, which would add up the two parts of ln 2.
@overload(sigmoid, jit_options=_OPTIONS | {'fastmath': {'contract', 'nsz'}, 'forceinline': True})
def _sigmoid(x):
    """A series in fp32, which LLVM vectorizes: it calls `exp` for one number at a time."""
    if x != types.float32:
        return lambda x: 1 / (1 + np.exp(-x))
    one, half, log2, most = (np.float32(c) for c in (1, 0.5, 1 / np.log(2), 87))
    high, low = np.float32(0.693359375), np.float32(np.log(2) - 0.693359375)
    c2, c3, c4, c5, c6, c7 = (np.float32(1 / math.factorial(i)) for i in range(2, 8))

    def series(x):
        y = -most if x > most else most if x < -most else -x
        n = np.floor(y * log2 + half)
        r = y - n * high - n * low
        p = one + r * (one + r * (c2 + r * (c3 + r * (c4 + r * (c5 + r * (c6 + r * c7))))))
        power = np.int32((np.int32(n) + 127) << 23).view(np.float32)  # 2ⁿ
        return one / (one + p * power)

    return series


@jit
def take_step(factor, damping, totals, weights, stepped):
    """Turns sums `(n, parts, rows, d)` into gradients, in part 0, and takes the steps.

    `stepped` is `(n, rows, d)`, `weights` one such matrix for each head. `damping` divides every
    column of a gradient by its norm plus 1.
    """
    one, scale = weights.dtype.type(1), np.zeros(totals.shape[3], weights.dtype)
    for n in range(len(totals)):
        g = totals[n, 0]
        for part in range(1, totals.shape[1]):
            g += totals[n, part]
        g *= factor
        scale[:] = 0
        for t in range(len(g)):
            row = g[t]
            for i in range(len(scale)):
                scale[i] += row[i] * row[i]
        for i in range(len(scale)):
            scale[i] = one / (np.sqrt(scale[i]) + one) if damping else one
        for t in range(len(g)):
            row, old, new = g[t], weights[n % len(weights), t], stepped[n, t]
            for i in range(len(scale)):
                new[i] = old[i] - row[i] * scale[i]


def unsupported_reason(args: Any) -> None:
    """Returns None: the kernel takes all arguments."""


# ------------------------------------------------------------------------------------------- tokens


@inlined
def round_to_bf16(x, count, dim):
    """Rounds `count` rows of fp32 numbers to bf16, ties to even."""
    for t in range(count):
        bits = x[t].view(np.uint32)
        for i in range(dim):
            bits[i] = (bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) & 0xFFFF0000


@inlined
def load(out, x, layout, first, count, dim):
    """Loads `count` tokens of `x` from `first` on and sets the rows below them to zero.

    `layout`: offset of the first token in `x`, whose memory is one row, and the stride to the next.
    """
    start, step = layout[0] + first * layout[1], layout[1]
    for t in range(count):
        row, line = out[t], x[start + t * step : start + t * step + dim]
        for i in range(dim):
            row[i] = line[i]
    for t in range(count, len(out)):
        out[t] = 0


@inlined
def store(x, out, layout, first, count, dim):
    """Stores the tokens of a chunk where `load` reads them."""
    start, step = layout[0] + first * layout[1], layout[1]
    for t in range(count):
        row, line = x[t], out[start + t * step : start + t * step + dim]
        for i in range(dim):
            line[i] = row[i]


def flat(*tensors: Tensor, dtype: torch.dtype, lead: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Memory of every tensor as one row, and its first `lead` strides. Features are dense."""
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


def _take_parts(context, module, shared, kernel, kinds):
    """An LLVM function of a pointer to `shared`: calls the kernel on parts until none are left."""
    kind = ir.FunctionType(ir.VoidType(), [shared.as_pointer()])
    function = ir.Function(module, kind, module.get_unique_name('take_parts'))
    function.linkage = 'internal'
    entry, loop, work, end = (function.append_basic_block(x) for x in ('', 'loop', 'work', 'end'))
    builder = ir.IRBuilder(entry)
    arguments, parts, count, following, *failed = (
        cgutils.gep_inbounds(builder, function.args[0], 0, i) for i in range(len(shared))
    )
    arguments = cgutils.unpack_tuple(builder, builder.load(arguments))
    parts, count = builder.load(parts), builder.load(count)
    one = ir.Constant(parts.type, 1)
    builder.branch(loop)
    builder.position_at_end(loop)
    part = builder.atomic_rmw('add', following, one, 'monotonic')
    builder.cbranch(builder.icmp_signed('<', part, parts), work, end)
    builder.position_at_end(work)
    bounds = [builder.sdiv(builder.mul(count, x), parts) for x in (part, builder.add(part, one))]
    alone = cgutils.pack_array(builder, [ir.Constant(parts.type, 0), one, *bounds])
    status, _ = context.call_conv.call_function(
        builder, kernel, types.none, kinds, (alone, *arguments)
    )
    with cgutils.if_unlikely(builder, status.is_error):
        for value, field in zip((status.code, status.excinfoptr), failed, strict=True):
            builder.store(value, field)
    builder.branch(loop)
    builder.position_at_end(end)
    builder.ret_void()
    return function


@intrinsic
def spread(typing, team, arguments):
    """First and last program of the calling kernel, whose arguments these are.

    `team` is that of `parallel`. If it has several threads, they call the kernel on parts of the
    range, and the range returned is empty. No thread takes Python's lock, for which it would wait
    longer than many a kernel runs.
    """

    def generate(context, builder, signature, values):
        start_team, threads, start, stop = cgutils.unpack_tuple(builder, values[0])
        zero, one = (ir.Constant(start.type, i) for i in (0, 1))
        # Shared by the threads: after the next part comes the status of a kernel that failed.
        code = ir.Constant(ir.IntType(32), 0)
        error = cgutils.get_null_value(ir.PointerType(excinfo_t))
        fields = values[1], start, stop, zero, code, error
        shared = ir.LiteralStructType([x.type for x in fields])
        memory = cgutils.alloca_once(builder, shared)
        pointers = [cgutils.gep_inbounds(builder, memory, 0, i) for i in range(len(fields))]
        several = builder.icmp_signed('>', threads, one)
        with cgutils.if_unlikely(builder, several):
            for field, pointer in zip(fields, pointers, strict=True):
                builder.store(field, pointer)
            kinds = team, *arguments.types
            take_parts = _take_parts(context, builder.module, shared, builder.function, kinds)
            kind = [take_parts.type, memory.type, code.type, code.type]
            kind = ir.FunctionType(ir.VoidType(), kind).as_pointer()
            started = builder.inttoptr(start_team, kind)
            threads = builder.trunc(threads, code.type)
            builder.call(started, [take_parts, memory, threads, code])
            failed = (builder.load(x) for x in pointers[-2:])
            status = context.call_conv._get_return_status(builder, *failed)
            with cgutils.if_unlikely(builder, status.is_error):
                context.call_conv.return_status_propagate(builder, status)
        return cgutils.pack_array(
            builder, [builder.select(several, zero, x) for x in (start, stop)]
        )

    return types.UniTuple(types.int64, 2)(team, arguments), generate


def parallel(kernel: Callable, count: int, work: int, *args: Any) -> None:
    """Calls `kernel(team, *args)`, which spreads the programs `range(count)` over torch's threads.

    `work` is in multiply-adds: little of it takes fewer threads. Which thread takes which part is
    undetermined, so a result must not depend on where its part begins.

    torch's threads spin between its operations and would compete with those of another pool, so
    these come from the OpenMP library that torch has loaded.
    """
    threads = min(torch.get_num_threads(), count, work // _WORTH_A_THREAD)
    if threads <= 1 or not _START_TEAM:
        kernel((0, 1, 0, count), *args)
    else:
        parts = min(count, _PARTS_PER_THREAD * threads)
        kernel((_START_TEAM, threads, parts, count), *args)


_START_TEAM: int
try:
    _START_TEAM = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
except (AttributeError, OSError, TypeError):  # no OpenMP, or one without GNU's entry points
    _START_TEAM = 0
