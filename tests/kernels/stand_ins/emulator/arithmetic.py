"""Arithmetic, comparisons and conversions of PTX on NumPy arrays of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory import Fault
from .program import UNSIGNED, Instruction

if TYPE_CHECKING:
    from .machine import Machine

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = ('f32', 'f64', 'f16', 'bf16', 'f16x2', 'bf16x2')


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def to_fp32(bits: np.ndarray, kind: str) -> np.ndarray:
    """Values of bits of 'f32', 'tf32', 'f16' or 'bf16'."""
    if kind == 'bf16':
        return bf16_to_fp32(bits)
    if kind == 'f16':
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    if kind == 'tf32':
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return bits.view(np.float32)


def from_fp32(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits of the nearest number of that kind."""
    values = np.asarray(values)
    if kind == 'bf16':
        return fp32_to_bf16(values.astype(np.float32))
    if kind == 'f16':
        return values.astype(np.float16).view(np.uint16)
    if kind == 'tf32':
        # To nearest, ties away from zero, as cvt.rna does.
        return (values.astype(np.float32).view(np.uint32) + np.uint32(0x1000)) & np.uint32(
            0xFFFFE000
        )
    return values.astype(np.float32).view(np.uint32)


def compute(machine: Machine, instruction: Instruction) -> np.ndarray:
    """The result of an instruction whose first operand is where it goes."""
    name, kind = instruction.name, instruction.modifiers[-1]
    if name == 'setp':
        return _compare(machine, instruction)
    if name == 'cvt':
        return _convert(machine, instruction)
    if name == 'selp':
        bits = int(kind[1:])
        yes, no = (machine.value(x, bits) for x in instruction.operands[1:3])
        return np.where(machine.value(instruction.operands[3], 1), yes, no)
    if kind == 'pred':
        given = [machine.value(x, 1) for x in instruction.operands[1:]]
        return {'and': np.bitwise_and, 'or': np.bitwise_or, 'xor': np.bitwise_xor,
                'not': np.bitwise_not}[name](*given)  # fmt: skip
    if kind in FLOATS:
        return _float(machine, instruction, kind)
    return _integer(machine, instruction, kind)


# -------------------------------------------------------------------------------------- floating


FLOAT = {
    'add': np.add,
    'sub': np.subtract,
    'mul': np.multiply,
    'div': np.divide,
    'max': np.fmax,
    'min': np.fmin,
    'neg': np.negative,
    'abs': np.abs,
    'fma': lambda a, b, c: a.astype(np.float64) * b + c,
    'rcp': lambda a: 1 / a.astype(np.float64),
    'sqrt': lambda a: np.sqrt(a.astype(np.float64)),
    'rsqrt': lambda a: 1 / np.sqrt(a.astype(np.float64)),
    'ex2': lambda a: np.exp2(a.astype(np.float64)),
    'lg2': lambda a: np.log2(a.astype(np.float64)),
    'tanh': lambda a: np.tanh(a.astype(np.float64)),
    'sin': lambda a: np.sin(a.astype(np.float64)),
    'cos': lambda a: np.cos(a.astype(np.float64)),
}


def _float(machine: Machine, instruction: Instruction, kind: str) -> np.ndarray:
    function = FLOAT.get(instruction.name)
    if function is None or kind == 'f64':
        raise NotImplementedError(f'the emulator does not know {instruction.text}')
    if kind == 'f32':
        given = [machine.floats(x) for x in instruction.operands[1:]]
        return np.asarray(function(*given)).astype(np.float32).view(np.uint32)
    if not kind.endswith('x2'):
        given = [to_fp32(machine.value(x, 16), kind) for x in instruction.operands[1:]]
        return from_fp32(function(*given), kind)
    one = kind.removesuffix('x2')
    pairs = [machine.value(x, 32) for x in instruction.operands[1:]]
    low = from_fp32(function(*(to_fp32(x.astype(np.uint16), one) for x in pairs)), one)
    high = from_fp32(function(*(to_fp32((x >> 16).astype(np.uint16), one) for x in pairs)), one)
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _compare(machine: Machine, instruction: Instruction) -> np.ndarray:
    how, kind = instruction.modifiers[0], instruction.modifiers[-1]
    bits = 32 if kind == 'tf32' else int(kind.removeprefix('bf').lstrip('fsbu'))
    a, b = (machine.value(x, bits) for x in instruction.operands[1:3])
    if kind in FLOATS:
        a, b = to_fp32(a, kind), to_fp32(b, kind)
        unordered = np.isnan(a) | np.isnan(b)
        if how in ('num', 'nan'):
            return ~unordered if how == 'num' else unordered
        if len(how) == 3:  # 'ltu': or unordered
            return ORDER[how[:2]](a, b) | unordered
        return ORDER[how](a, b) & ~unordered
    if kind[0] == 's':
        a, b = a.view(SIGNED[bits]), b.view(SIGNED[bits])
    return ORDER[{'lo': 'lt', 'ls': 'le', 'hi': 'gt', 'hs': 'ge'}.get(how, how)](a, b)


ORDER = {
    'lt': np.less,
    'le': np.less_equal,
    'gt': np.greater,
    'ge': np.greater_equal,
    'eq': np.equal,
    'ne': np.not_equal,
}


def _convert(machine: Machine, instruction: Instruction) -> np.ndarray:
    to, source = instruction.modifiers[-2:]
    if to in ('bf16x2', 'f16x2'):
        one = to.removesuffix('x2')
        high, low = (
            from_fp32(machine.floats(x), one).astype(np.uint32) for x in instruction.operands[1:3]
        )
        return low | (high << np.uint32(16))
    operand = instruction.operands[1]
    if source in ('f32', 'f16', 'bf16'):
        values = to_fp32(machine.value(operand, 32 if source == 'f32' else 16), source)
        # Rounding to whole numbers, in their own type too.
        modes = {'rni': np.rint, 'rmi': np.floor, 'rpi': np.ceil, 'rzi': np.trunc}
        if mode := next((m for m in instruction.modifiers if m in modes), None):
            values = modes[mode](values)
    else:
        bits = int(source[1:])
        values = machine.value(operand, bits).astype(UNSIGNED[bits])
        if source[0] == 's':
            values = values.view(SIGNED[bits])
    if to in ('f32', 'f16', 'bf16', 'tf32'):
        return from_fp32(values, to)
    bits = int(to[1:])
    kind = SIGNED[bits] if to[0] == 's' else UNSIGNED[bits]
    return values.astype(kind).view(UNSIGNED[bits]).astype(UNSIGNED[max(bits, 16)])


# ------------------------------------------------------------------------------------- integers


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero, as in C."""
    if (b == 0).any():
        raise Fault('a division of integers by zero')
    whole = np.abs(a) // np.abs(b) if a.dtype.kind == 'i' else a // b
    return np.where((a < 0) != (b < 0), -whole, whole).astype(a.dtype)


INTEGER = {
    'add': np.add,
    'sub': np.subtract,
    'mul': np.multiply,
    'mad': lambda a, b, c: a * b + c,
    'and': np.bitwise_and,
    'or': np.bitwise_or,
    'xor': np.bitwise_xor,
    'not': np.bitwise_not,
    'neg': np.negative,
    'abs': np.abs,
    'min': np.minimum,
    'max': np.maximum,
    'div': _quotient,
    'rem': lambda a, b: a - _quotient(a, b) * b,
}


def _integer(machine: Machine, instruction: Instruction, kind: str) -> np.ndarray:
    name, operands = instruction.name, instruction.operands[1:]
    bits = int(kind[1:])
    width = SIGNED if kind[0] == 's' else UNSIGNED

    def given(operand: str, bits: int) -> np.ndarray:
        return machine.value(operand, bits).astype(UNSIGNED[bits]).view(width[bits])

    if instruction.has('wide'):
        a, b = (given(x, bits).astype(width[2 * bits]) for x in operands[:2])
        result = a * b
        if name == 'mad':
            result = result + given(operands[2], 2 * bits)
        return result.view(UNSIGNED[2 * bits])
    if instruction.has('hi'):
        if bits != 32:
            raise NotImplementedError(f'the emulator does not know {instruction.text}')
        a, b = (given(x, 32).astype(width[64]) for x in operands[:2])
        result = ((a * b) >> 32).astype(width[32])
        return (result + given(operands[2], 32) if name == 'mad' else result).view(np.uint32)
    if name in ('shl', 'shr'):
        return _shift(given(operands[0], bits), machine.value(operands[1], 32), name, bits)
    if name == 'shf':
        low, high = (machine.value(x, 32).astype(np.uint64) for x in operands[:2])
        by = machine.value(operands[2], 32).astype(np.uint64) % np.uint64(32)
        both = low | (high << np.uint64(32))
        if instruction.has('l'):
            return ((both << by) >> np.uint64(32)).astype(np.uint32)
        return (both >> by).astype(np.uint32)
    if name == 'bfe':
        start, length = (int(x, 0) for x in operands[1:])
        top = given(operands[0], bits) << width[bits](bits - length - start)
        return (top >> width[bits](bits - length)).view(UNSIGNED[bits])
    if name == 'prmt':
        return _permute(*(machine.value(x, 32) for x in operands))
    if name == 'lop3':
        return _table(*(machine.value(x, 32) for x in operands[:3]), int(operands[3], 0))
    if name == 'popc':
        return np.bitwise_count(given(operands[0], bits)).astype(np.uint32)
    function = INTEGER.get(name)
    if function is None:
        raise NotImplementedError(f'the emulator does not know {instruction.text}')
    return function(*(given(x, bits) for x in operands)).view(UNSIGNED[bits])


def _shift(values: np.ndarray, by: np.ndarray, name: str, bits: int) -> np.ndarray:
    # A shift by all bits or more leaves none, or the sign's.
    beyond = by >= bits
    by = np.minimum(by, bits - 1).astype(values.dtype)
    if name == 'shr' and values.dtype.kind == 'i':
        return (values >> by).view(UNSIGNED[bits])
    shifted = values << by if name == 'shl' else values >> by
    return np.where(beyond, values.dtype.type(0), shifted).view(UNSIGNED[bits])


def _permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    result = np.zeros(1, np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint32(8), sign, byte)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * i))
    return result


def _table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    result = np.zeros(1, np.uint32)
    for i in range(8):
        if table >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result
