"""Matrix instructions of PTX: mma, wgmma from shared memory, ldmatrix and stmatrix.

Fragments are laid out as in the PTX ISA, "Matrix fragments for mma" and "Asynchronous warpgroup
level matrix instructions". Products are summed in fp64 and rounded once to fp32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import to_fp32
from .memory import Fault
from .program import Instruction, elements

if TYPE_CHECKING:
    from .machine import Machine


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return words.astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _mma(machine: Machine, instruction: Instruction, mask: np.ndarray | None) -> None:
    shape = next(m for m in instruction.modifiers if re.fullmatch(r'm\d+n\d+k\d+', m))
    _, kind, _, out = instruction.modifiers[-4:]
    if out != 'f32' or shape not in ('m16n8k16', 'm16n8k8'):
        raise NotImplementedError(f'the emulator does not know {instruction.text}')
    lane = machine.thread % 32
    warp = np.arange(machine.lanes) // 32
    row, pair = lane // 4, lane % 4
    d, a, b, c = (elements(x) for x in instruction.operands)
    depth = int(shape.partition('k')[2])
    left = np.zeros((machine.lanes // 32, 16, depth))
    right = np.zeros((machine.lanes // 32, depth, 8))
    sums = np.zeros((machine.lanes // 32, 16, 8))
    # A register of 16-bit numbers holds two neighbours along the summed axis.
    packed = kind in ('bf16', 'f16')
    for i, register in enumerate(a):
        words = machine.full(machine.value(register, 32))
        rows = row + 8 * (i % 2)
        if packed:
            columns = 2 * pair + 8 * (i // 2)
            for j, half in enumerate(_halves(words)):
                left[warp, rows, columns + j] = to_fp32(half, kind)
        else:
            left[warp, rows, pair + 4 * (i // 2)] = to_fp32(words, kind)
    for i, register in enumerate(b):
        words = machine.full(machine.value(register, 32))
        if packed:
            for j, half in enumerate(_halves(words)):
                right[warp, 2 * pair + 8 * i + j, row] = to_fp32(half, kind)
        else:
            right[warp, pair + 4 * i, row] = to_fp32(words, kind)
    places = [(warp, row + 8 * (i // 2), 2 * pair + i % 2) for i in range(4)]
    for register, place in zip(c, places, strict=True):
        sums[place] = machine.full(machine.floats(register))
    result = (left @ right + sums).astype(np.float32)
    for register, place in zip(d, places, strict=True):
        machine.write(register, result[place].view(np.uint32), mask)


def _matrices(instruction: Instruction) -> int:
    return int(next(m for m in instruction.modifiers if re.fullmatch(r'x[124]', m))[1:])


def _row_lanes(machine: Machine, i: int) -> np.ndarray:
    """The lanes of every warp whose addresses are the rows of matrix `i`."""
    return (np.arange(machine.lanes // 32)[:, None] * 32 + 8 * i + np.arange(8)).ravel()


def _ldmatrix(machine: Machine, instruction: Instruction, mask: np.ndarray | None) -> None:
    addresses = machine.addresses(instruction.operands[1], 'shared')
    lane, warp = machine.thread % 32, np.arange(machine.lanes) // 32
    registers = elements(instruction.operands[0])
    for i in range(_matrices(instruction)):
        lanes = _row_lanes(machine, i)
        rows = machine.load_shared(addresses[lanes], lanes, 16).view(np.uint16).reshape(-1, 8, 8)
        if instruction.has('trans'):
            rows = rows.transpose(0, 2, 1)
        low, high = (rows[warp, lane // 4, 2 * (lane % 4) + j] for j in range(2))
        machine.write(registers[i], _joined(low, high), mask)


def _stmatrix(machine: Machine, instruction: Instruction, mask: np.ndarray | None) -> None:
    addresses = machine.addresses(instruction.operands[0], 'shared')
    lane, warp = machine.thread % 32, np.arange(machine.lanes) // 32
    for i, register in enumerate(elements(instruction.operands[1])):
        rows = np.zeros((machine.lanes // 32, 8, 8), np.uint16)
        for j, half in enumerate(_halves(machine.full(machine.value(register, 32)))):
            rows[warp, lane // 4, 2 * (lane % 4) + j] = half
        if instruction.has('trans'):
            rows = rows.transpose(0, 2, 1)
        lanes = _row_lanes(machine, i)
        values = np.ascontiguousarray(rows).reshape(-1, 8).view(np.uint8)
        machine.store_shared(addresses[lanes], lanes, values)


# ---------------------------------------------------------------------------------------- wgmma

# Bytes of a row, and bits of the address that are permuted, by the swizzle of a descriptor.
SWIZZLE = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}


def _operand_places(descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """Addresses in shared memory of a matrix `(rows, 16)` of 16-bit numbers."""
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    pitch, permuted = SWIZZLE[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise NotImplementedError('the emulator knows matrices at the start of a swizzle only')
    i, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if transposed:
        wide = pitch // 2
        places = i // wide * leading + k // 8 * stride + k % 8 * pitch + i % wide * 2
    elif permuted:
        places = i // 8 * stride + i % 8 * pitch + k * 2
    else:
        places = i // 8 * stride + i % 8 * 16 + k // 8 * leading + k % 8 * 2
    places = places + start
    return places ^ ((places >> 7 & permuted) << 4)


def _wgmma(machine: Machine, instruction: Instruction, mask: np.ndarray | None) -> None:
    if not instruction.has('mma_async'):
        return  # fences, commits and waits: here a product is there at once
    shape, kind = instruction.modifiers[3], instruction.modifiers[-1]
    columns = int(shape.removeprefix('m64n').partition('k')[0])
    d, a, b, add = instruction.operands[:4]
    if a.startswith('{') or kind not in ('bf16', 'f16'):
        raise NotImplementedError(f'the emulator does not know {instruction.text}')
    transposed = [int(x) for x in instruction.operands[-2:]]
    keep = machine.full(machine.value(add, 1))
    group = np.arange(128)
    row = 16 * (group // 32) + group % 32 // 4
    # One warp group after the other, in every program.
    for first in range(0, machine.lanes, 128):
        lanes = first + group
        matrices = []
        for operand, rows, turned in zip((a, b), (64, columns), transposed, strict=True):
            descriptors = machine.full(machine.value(operand, 64))[lanes]
            if (descriptors != descriptors[0]).any():
                raise Fault('the threads of a warp group name different matrices')
            places = _operand_places(int(descriptors[0]), rows, bool(turned))
            # All warps of the group read all of it.
            for warp in range(0, 128, 32):
                reader = np.full(places.size, lanes[warp])
                words = machine.load_shared(places.ravel(), reader, 2, asynchronous=True)
                words = words.view(np.uint16)
            matrices.append(to_fp32(words.reshape(places.shape), kind).astype(np.float64))
        product = matrices[0] @ matrices[1].T
        for i, register in enumerate(elements(d)):
            column = 8 * (i // 4) + 2 * (group % 4) + i % 2
            added = product[row + 8 * (i // 2 % 2), column]
            old = machine.registers.get(register, np.zeros(1, np.uint32))
            values = machine.full(old).copy()
            before = np.where(keep[lanes], values[lanes].view(np.float32), np.float32(0))
            values[lanes] = (before + added).astype(np.float32).view(np.uint32)
            machine.registers[register] = values


INSTRUCTIONS = {'mma': _mma, 'wgmma': _wgmma, 'ldmatrix': _ldmatrix, 'stmatrix': _stmatrix}
