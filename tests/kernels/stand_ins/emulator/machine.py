"""The threads of several programs in lockstep: registers, control flow, and moving data."""

from typing import NamedTuple

import numpy as np

from . import arithmetic, tensor_core
from .memory import Fault, GlobalMemory, SharedMemory
from .program import UNSIGNED, Instruction, Program, address, constant, elements

LIMIT = 10**7  # instructions, beyond which a kernel does not end


class EmulationError(RuntimeError):
    """A forbidden operation of a kernel, with its place in the code."""


class Copy(NamedTuple):
    """A cp.async on its way; every field has one row a lane."""

    active: np.ndarray
    addresses: np.ndarray
    values: np.ndarray


class Machine:
    """Programs of one launch that take the same branches; where they part, so does the machine.

    A register holds one value a lane, `(programs·threads,)`, or one for all, `(1,)`, as bits in an
    unsigned type of its width; predicates are bool.
    """

    def __init__(
        self,
        program: Program,
        arguments: dict[str, int],
        coordinates: np.ndarray,  # (programs, 3)
        threads: int,
        shared: int,
        memory: GlobalMemory,
        copies_land_late: bool = True,
    ) -> None:
        self.program, self.arguments, self.memory = program, arguments, memory
        self.threads, self.copies_land_late = threads, copies_land_late
        self.shared = SharedMemory(len(coordinates), shared)
        self.registers: dict[str, np.ndarray] = {}
        self.at = 0
        self._issued: list[Copy] = []
        self._groups: list[list[Copy]] = []
        self._arrange(coordinates)

    def _arrange(self, coordinates: np.ndarray) -> None:
        self.coordinates, self.programs = coordinates, len(coordinates)
        self.lanes = self.programs * self.threads
        self.thread = np.tile(np.arange(self.threads), self.programs)
        self.lane_program = np.repeat(np.arange(self.programs), self.threads)
        self.lane_warp = self.thread // 32

    # ------------------------------------------------------------------------------ control flow

    def run(self) -> None:
        instructions = self.program.instructions
        for _ in range(LIMIT):
            if self.at >= len(instructions):
                return
            instruction = instructions[self.at]
            self.at += 1
            try:
                if instruction.name == 'bra':
                    self._branch(instruction)
                elif instruction.name == 'ret':
                    if self._taken(instruction):
                        return
                else:
                    self._execute(instruction)
            except Fault as fault:
                raise EmulationError(
                    f'{fault} (PTX line {instruction.line}, source line {instruction.source}: '
                    f'{instruction.text})'
                ) from None
        raise EmulationError(f'more than {LIMIT} instructions: does the kernel end?')

    def _mask(self, instruction: Instruction) -> np.ndarray | None:
        """Lanes that an instruction is for, None for all."""
        if not instruction.predicate:
            return None
        mask = self.value(instruction.predicate, 1)
        return ~mask if instruction.negated else mask

    def _taken(self, instruction: Instruction) -> bool:
        """Whether to jump; parts with the programs that do otherwise."""
        mask = self._mask(instruction)
        if mask is None or mask.all():
            return True
        by_program = self.full(mask).reshape(self.programs, self.threads)
        some, every = by_program.any(1), by_program.all(1)
        if (some != every).any():
            raise Fault('the threads of a program part at a branch')
        if some.any():
            self._part(~some).run()
            self._keep(some)
        return bool(some.any())

    def _branch(self, instruction: Instruction) -> None:
        if self._taken(instruction):
            self.at = self.program.labels[instruction.operands[-1]]

    def _part(self, kept: np.ndarray) -> 'Machine':
        other = object.__new__(Machine)
        other.__dict__ |= self.__dict__
        other._keep(kept)
        return other

    def _keep(self, kept: np.ndarray) -> None:
        lanes = np.repeat(kept, self.threads)
        self.registers = {
            name: x if len(x) == 1 else x[lanes] for name, x in self.registers.items()
        }

        def some(copies: list[Copy]) -> list[Copy]:
            return [Copy(*(x[lanes] for x in copy)) for copy in copies]

        self._issued, self._groups = some(self._issued), [some(g) for g in self._groups]
        self.shared = self.shared.part(kept)
        self._arrange(self.coordinates[kept])

    # --------------------------------------------------------------------------------- registers

    def value(self, operand: str, bits: int) -> np.ndarray:
        """The bits of a register, a special register or an immediate; 1 bit is a predicate."""
        if not operand.startswith('%'):
            return constant(operand, 8).astype(bool) if bits == 1 else constant(operand, bits)
        if (found := self.registers.get(operand)) is not None:
            return found
        kind, _, axis = operand[1:].partition('.')
        if kind == 'tid':
            return (self.thread if axis == 'x' else np.zeros(1)).astype(np.uint32)
        if kind == 'ctaid':
            numbers = self.coordinates[:, 'xyz'.index(axis)].astype(np.uint32)
            return np.repeat(numbers, self.threads)
        if kind == 'laneid':
            return (self.thread % 32).astype(np.uint32)
        raise Fault(f'{operand} is read before anything was written there')

    def _part_of_word(self, operand: str, bits: int) -> np.ndarray:
        """`value`; NaN of a half that no instruction writes.

        LLVM leaves such halves in words of which it looks at the other one only.
        """
        if bits == 16 and operand not in self.registers and operand not in self.program.written:
            return np.full(1, 0xFFFF, np.uint16)
        return self.value(operand, bits)

    def floats(self, operand: str) -> np.ndarray:
        return self.value(operand, 32).view(np.float32)

    def full(self, values: np.ndarray) -> np.ndarray:
        """One value a lane."""
        return np.broadcast_to(values, (self.lanes,))

    def write(self, register: str, values: np.ndarray, mask: np.ndarray | None = None) -> None:
        if register == '_':
            return
        if mask is not None and not mask.all():
            # Lanes that are switched off keep what they had; nothing may look at it if that is
            # nothing, but which lanes look is known only later.
            old = self.registers.get(register, np.zeros(1, values.dtype))
            values = np.where(mask, values, old)
        self.registers[register] = values

    # ----------------------------------------------------------------------------- instructions

    def _execute(self, instruction: Instruction) -> None:
        mask = self._mask(instruction)
        move = getattr(self, f'_{instruction.name}', None)
        if move is not None:
            move(instruction, mask)
        elif instruction.name in tensor_core.INSTRUCTIONS:
            tensor_core.INSTRUCTIONS[instruction.name](self, instruction, mask)
        else:
            result = arithmetic.compute(self, instruction)
            self.write(instruction.operands[0], result, mask)

    def _mov(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        kind = instruction.modifiers[-1]
        to, source = instruction.operands
        if kind == 'pred':
            return self.write(to, self.value(source, 1), mask)
        bits = int(kind[1:])
        if to.startswith('{'):
            parts = elements(to)
            width = bits // len(parts)
            whole = self.value(source, bits)
            for i, part in enumerate(parts):
                piece = whole >> whole.dtype.type(width * i)
                self.write(part, piece.astype(UNSIGNED[width]), mask)
            return None
        if source.startswith('{'):
            parts = elements(source)
            width = bits // len(parts)
            pieces = [
                self._part_of_word(x, width).astype(UNSIGNED[bits]) << UNSIGNED[bits](width * i)
                for i, x in enumerate(parts)
            ]
            return self.write(to, np.bitwise_or.reduce(np.broadcast_arrays(*pieces)), mask)
        return self.write(to, self.value(source, bits).astype(UNSIGNED[bits]), mask)

    def _cvta(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        self.write(instruction.operands[0], self.value(instruction.operands[1], 64), mask)

    def active(self, mask: np.ndarray | None) -> np.ndarray:
        """Numbers of the lanes that are switched on."""
        return np.arange(self.lanes) if mask is None else np.nonzero(self.full(mask))[0]

    def addresses(self, operand: str, space: str) -> np.ndarray:
        register, offset = address(operand)
        if space == 'shared':
            return self.full(self.value(register, 32).astype(np.int64) + offset)
        moved = self.value(register, 64).view(np.int64) + offset
        return self.full(moved.view(np.uint64))

    def load_shared(
        self, addresses: np.ndarray, lanes: np.ndarray, size: int, asynchronous: bool = False
    ) -> np.ndarray:
        """Bytes `(lanes, size)` from one address for each of these lanes."""
        of = (self.lane_program[lanes], self.lane_warp[lanes])
        return self.shared.load(addresses, *of, size, asynchronous)

    def store_shared(self, addresses: np.ndarray, lanes: np.ndarray, values: np.ndarray) -> None:
        self.shared.store(addresses, self.lane_program[lanes], self.lane_warp[lanes], values)

    def _ld(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        kind = instruction.modifiers[-1]
        bits = int(kind[1:])
        if instruction.has('param'):
            register, offset = address(instruction.operands[1])
            assert offset == 0, instruction.text
            value = np.array([self.arguments[register] & ((1 << bits) - 1)], UNSIGNED[bits])
            return self.write(instruction.operands[0], value, mask)
        registers = elements(instruction.operands[0])
        space = 'shared' if instruction.has('shared') else 'global'
        lanes = self.active(mask)
        if len(lanes) == 0:
            return None
        addresses = self.addresses(instruction.operands[1], space)[lanes]
        size = bits // 8 * len(registers)
        if space == 'shared':
            found = self.load_shared(addresses, lanes, size)
        else:
            found = self.memory.load(addresses, size)
        found = found.view(UNSIGNED[bits])
        for i, register in enumerate(registers):
            values = np.zeros(self.lanes, UNSIGNED[max(bits, 16)])
            values[lanes] = found[:, i]
            self.write(register, values, mask)
        return None

    def _st(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        bits = int(instruction.modifiers[-1][1:])
        space = 'shared' if instruction.has('shared') else 'global'
        lanes = self.active(mask)
        if len(lanes) == 0:
            return
        addresses = self.addresses(instruction.operands[0], space)[lanes]
        values = np.stack(
            [
                self.full(self.value(x, max(bits, 16)).astype(UNSIGNED[bits]))[lanes]
                for x in elements(instruction.operands[1])
            ],
            axis=1,
        ).view(np.uint8)
        if space == 'shared':
            self.store_shared(addresses, lanes, values)
        else:
            self.memory.store(addresses, values)

    def _bar(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        if instruction.has('warp'):
            return  # the lanes of a warp are in step here
        if instruction.operands != ('0',) or mask is not None:
            raise Fault('the emulator knows barriers of all warps only')
        self.shared.epoch += 1

    _barrier = _bar

    def _cp(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        """cp.async: the bytes are fetched now, and land at once or as late as the wait allows."""
        if instruction.has('commit_group'):
            self._groups.append(self._issued)
            self._issued = []
            return
        if instruction.has('wait_group'):
            while len(self._groups) > int(instruction.operands[0]):
                for copy in self._groups.pop(0):
                    if self.copies_land_late:
                        self._land(copy)
                    else:
                        lanes = np.nonzero(copy.active)[0]
                        programs = self.lane_program[lanes]
                        self.shared.arrive(copy.addresses[lanes], programs, copy.values.shape[1])
            return
        to = self.addresses(instruction.operands[0], 'shared')
        source = self.addresses(instruction.operands[1], 'global')
        size = int(instruction.operands[2], 0)
        active = self.full(np.ones(1, bool) if mask is None else mask)
        values = np.zeros((self.lanes, size), np.uint8)
        read = active
        if len(instruction.operands) > 3:
            # Bytes beyond those that are read become 0: Triton's masks are all or nothing.
            read = active & self.full(self.value(instruction.operands[3], 32) > 0)
        if read.any():
            values[read] = self.memory.load(source[read], size)
        self._issued.append(Copy(active, to, values))
        if not self.copies_land_late:
            self._land(self._issued[-1])

    def _land(self, copy: Copy) -> None:
        lanes = np.nonzero(copy.active)[0]
        self.store_shared(copy.addresses[lanes], lanes, copy.values[lanes])

    def _fence(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        """Only a fence of proxies orders more than lockstep does."""
        if instruction.modifiers[:2] == ('proxy', 'async'):
            if mask is not None:
                raise Fault('the emulator knows proxy fences of all threads only')
            self.shared.fence()

    def _shfl(self, instruction: Instruction, mask: np.ndarray | None) -> None:
        to, source, lane = instruction.operands[:3]
        values = self.full(self.value(source, 32))
        own = self.thread % 32
        other = self.value(lane, 32).astype(np.int64)
        if instruction.has('bfly'):
            other = own ^ other
        elif not instruction.has('idx'):
            raise Fault('the emulator knows shuffles by index and by butterfly only')
        self.write(to, values[np.arange(self.lanes) - own + other % 32], mask)
