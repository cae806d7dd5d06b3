"""A model of one multiprocessor that runs the main loop of a compiled kernel, from its SASS.

The assembler writes into every instruction how long to stall and which of six scoreboards to wait
for; the model replays them for all warps of all resident programs: four schedulers that issue one
instruction a cycle, a tensor core and a special-function unit for each, one queue to shared and
global memory, barriers. What it leaves out: caches and bandwidth beyond a fixed latency, bank
conflicts, register banks, instruction fetch. So it compares designs of one kind; its absolute
figures are predictions until `make gpu` has calibrated them (`predict.py --calibrate`).
"""

import heapq
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton
from triton.compiler import CompiledKernel

# Cycles until a result is there, of what the scoreboards guard; from published microbenchmarks.
LATENCY = {'SHFL': 24, 'LDS': 28, 'LDSM': 33, 'MUFU': 23, 'LDC': 30, 'S2R': 30, 'R2UR': 12}
OTHER_GUARDED, ARITHMETIC = 20, 6
GLOBAL, LOCAL, STORED = 300, 35, 12
TENSOR_CORE, TENSOR_CORE_BUSY, SPECIAL_BUSY = 33, 8, 8
BARRIER, BRANCH = 15, 6
QUEUE = 24  # cycles of work that the memory queue holds before a scheduler waits
MEMORY = {'SHFL', 'LDS', 'STS', 'LDSM', 'STSM', 'LDG', 'STG', 'LDGSTS', 'LDL', 'STL', 'ATOMS'}
STORES = {'STG', 'STS', 'STL', 'STSM'}
SCHEDULERS, SCOREBOARDS = 4, 6
# Registers of a multiprocessor, and bytes of shared memory by architecture.
REGISTERS, SHARED = 65536, {80: 164 << 10, 90: 228 << 10}
ITERATIONS, WARM_UP = 18, 3


class Instruction(NamedTuple):
    name: str
    modifiers: str
    text: str
    predicated: bool
    stall: int
    sets: int  # the scoreboard that its result clears, 7 is none
    frees: int  # the one that the end of its reads clears
    waits: int  # a bit for each scoreboard
    registers: tuple[int, ...]  # the first is where a result goes


class Loop(NamedTuple):
    """The main loop of a kernel, as the instructions of one iteration."""

    body: tuple[Instruction, ...]
    registers: int  # of a thread
    warps: int  # of a program
    resident: int  # programs that fit a multiprocessor

    @property
    def spills(self) -> int:
        names = Counter(i.name for i in self.body)
        return names['LDL'] + names['STL']


def _tool(name: str, *arguments: str) -> str:
    binary = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / name
    return subprocess.run(
        [str(binary), *arguments], check=True, capture_output=True, text=True
    ).stdout


def main_loop(compiled: CompiledKernel, arch: int) -> Loop | None:
    """The loop of a kernel that `innermost` finds, None where it has none."""
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        code = _tool('nvdisasm', '-c', '-hex', file.name)
        usage = _tool('cuobjdump', '-res-usage', file.name)
    instructions, labels = _read(code)
    found = innermost(instructions, labels)
    if found is None:
        return None
    start, end = found
    registers = int(re.search(r'REG:(\d+)', usage)[1])
    warps = compiled.metadata.num_warps
    fit = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    if compiled.metadata.shared:
        # A kilobyte of each program's is the system's.
        fit = min(fit, SHARED[arch] // (compiled.metadata.shared + 1024))
    body = _iteration(instructions, labels, start, end)
    return Loop(body, registers, warps, max(1, min(fit, 64 // warps)))


def innermost(instructions: list[Instruction], labels: dict[str, int]) -> tuple[int, int] | None:
    """Start and end of the longest loop without a loop inside: the one over tokens.

    The one over segments around it is longer, and what skips short segments would skip its body.
    """
    loops: dict[int, int] = {}  # where a loop starts, and its last way back to there
    for end, instruction in enumerate(instructions):
        start = labels.get(_target(instruction), len(instructions))
        if instruction.name == 'BRA' and start <= end and end - start > 20:
            loops[start] = end + 1
    found = [
        (end - start, start, end)
        for start, end in loops.items()
        if not any(start < other < end for other in loops)
    ]
    return max(found)[1:] if found else None


def _read(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions with their control bits, the upper 23 of 128, and where the labels are."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    text, low = '', True
    for line in code.splitlines():
        if label := re.match(r'\s*(\.L_x_\d+):', line):
            labels[label[1]] = len(instructions)
        elif first := re.match(r'\s*/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x[0-9a-f]{16} \*/', line):
            text, low = first[1].strip(), False
        elif not low and (second := re.match(r'\s*/\* 0x([0-9a-f]{16}) \*/', line)):
            instructions.append(_decode(text, int(second[1], 16) >> 41))
            low = True
    return instructions, labels


def _decode(text: str, control: int) -> Instruction:
    predicate, name, modifiers, rest = re.match(
        r'((?:@!?U?P\w+\s+)?)([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*(.*)', text
    ).groups()
    return Instruction(
        name=name,
        modifiers=modifiers,
        text=text,
        predicated=bool(predicate),
        stall=max(control & 15, 1),
        sets=control >> 5 & 7,
        frees=control >> 8 & 7,
        waits=control >> 11 & 63,
        registers=tuple(int(r) for r in re.findall(r'\bR(\d+)\b', rest)),
    )


def _target(instruction: Instruction) -> str:
    found = re.search(r'`\((\.L_x_\d+)\)', instruction.text)
    return found[1] if found else ''


def _iteration(
    instructions: list[Instruction], labels: dict[str, int], start: int, end: int
) -> tuple[Instruction, ...]:
    """Instructions of one iteration; forward branches within the loop count as taken."""
    body, at = [], start
    while at < end:
        instruction = instructions[at]
        body.append(instruction)
        to = labels.get(_target(instruction), 0)
        jumps = instruction.name == 'BRA' and at < end - 1 and at < to < end
        at = to if jumps else at + 1
    return tuple(body)


def _service(instruction: Instruction) -> int:
    """Cycles of the shared-memory pipe."""
    if instruction.name in ('LDS', 'STS'):
        return 4 if '.128' in instruction.modifiers else 2 if '.64' in instruction.modifiers else 1
    if instruction.name in ('LDSM', 'STSM'):
        matrices = re.search(r'\.([24])\b', instruction.modifiers)
        return int(matrices[1]) if matrices else 1
    return 1


def _fetched(product: Instruction, columns: int) -> float:
    """Cycles of the shared-memory pipe, 128 bytes each, for a warp's share of a WGMMA's operands.

    32 bytes of 16 rows of the first, unless it is in registers, and a quarter of the second.
    """
    first = 0 if re.search(r'R\d+, R\d+, gdesc', product.text) else 4
    return first + columns / 16


class _Step(NamedTuple):
    """An instruction with what is asked of it most often.

    Attributes:
        instruction: As it was read.
        registers: Its own.
        waits: Numbers of the scoreboards that it waits for.
        unit: What its warps share beside their scheduler, if anything.
    """

    instruction: Instruction
    registers: tuple[int, ...]
    waits: tuple[int, ...]
    unit: str

    @classmethod
    def of(cls, instruction: Instruction) -> '_Step':
        waits = tuple(i for i in range(SCOREBOARDS) if instruction.waits >> i & 1)
        unit = {'HMMA': 'tensor', 'HGMMA': 'tensor', 'MUFU': 'special'}.get(instruction.name, '')
        unit = 'memory' if instruction.name in MEMORY else unit
        return cls(instruction, instruction.registers, waits, unit)


class _Warp:
    def __init__(self, program: int, scheduler: int) -> None:
        self.program, self.scheduler = program, scheduler
        self.at, self.iteration, self.time = 0, 0, 0.0
        self.scoreboards = [0.0] * SCOREBOARDS
        self.results: dict[int, float] = {}  # tensor cores: no scoreboard guards them
        self.starts: list[float] = []
        self.waiting = False
        self.copies, self.groups, self.product = 0.0, [], 0.0

    def ready(self, step: _Step) -> float:
        time = self.time
        for board in step.waits:
            if (guarded := self.scoreboards[board]) > time:
                time = guarded
        if self.results:
            for register in step.registers:
                if (result := self.results.get(register, 0.0)) > time:
                    time = result
        return time


class _Multiprocessor:
    def __init__(self, loop: Loop, programs: int) -> None:
        self.loop = loop
        self.steps = [_Step.of(instruction) for instruction in loop.body]
        self.warps = []
        for program in range(programs):
            for warp in range(loop.warps):
                # Programs of fewer warps than schedulers take turns.
                place = warp if loop.warps >= SCHEDULERS else warp + program * loop.warps
                self.warps.append(_Warp(program, place % SCHEDULERS))
        self.issued, self.tensor, self.special = ([0.0] * SCHEDULERS for _ in range(3))
        self.memory = 0.0
        self.arrived: dict[int, list[tuple[float, int]]] = {p: [] for p in range(programs)}
        # By time; of those that could issue at once, the one that is behind.
        self.heap = [(0.0, 0, number) for number in range(len(self.warps))]

    def run(self) -> None:
        while self.heap:
            due, _, number = heapq.heappop(self.heap)
            warp = self.warps[number]
            step = self.steps[warp.at]
            time = self._earliest(warp, step)
            if time > due + 1e-9:
                self._queue(time, number)
                continue
            instruction = step.instruction
            if warp.at == 0:
                warp.starts.append(time)
            self.issued[warp.scheduler] = time + 1
            time = self._issue(warp, instruction, time)
            warp.time = time + instruction.stall
            if instruction.name == 'BRA':
                warp.time += BRANCH
            warp.at += 1
            if warp.at == len(self.loop.body):
                warp.at = 0
                warp.iteration += 1
            if instruction.name == 'BAR':
                self._meet(warp, number, time)
            elif warp.iteration < ITERATIONS:
                self._queue(warp.time, number)

    def _queue(self, time: float, number: int) -> None:
        warp = self.warps[number]
        done = warp.iteration * len(self.loop.body) + warp.at
        heapq.heappush(self.heap, (time, done, number))

    def _earliest(self, warp: _Warp, step: _Step) -> float:
        time, scheduler = warp.ready(step), warp.scheduler
        if (issued := self.issued[scheduler]) > time:
            time = issued
        if not step.unit:
            return time
        if step.unit == 'memory':
            return max(time, self.memory - QUEUE)
        return max(time, (self.tensor if step.unit == 'tensor' else self.special)[scheduler])

    def _issue(self, warp: _Warp, instruction: Instruction, time: float) -> float:
        """Occupies units and sets scoreboards; the time, which a wait moves on."""
        name, registers = instruction.name, instruction.registers
        done = time + LATENCY.get(name, OTHER_GUARDED if instruction.sets != 7 else ARITHMETIC)
        read = time + 10
        if name == 'HMMA':
            self.tensor[warp.scheduler] = time + TENSOR_CORE_BUSY
            for register in range(registers[0], registers[0] + 4) if registers else ():
                warp.results[register] = time + TENSOR_CORE
        elif name == 'HGMMA':
            columns = int(re.search(r'64x(\d+)x', instruction.modifiers)[1])
            self.tensor[warp.scheduler] = max(self.tensor[warp.scheduler], time) + columns / 2
            self.memory = max(self.memory, time) + _fetched(instruction, columns)
            warp.product = self.tensor[warp.scheduler] + 40
        elif name == 'MUFU':
            self.special[warp.scheduler] = time + SPECIAL_BUSY
        elif name in MEMORY:
            begun = max(self.memory, time + 6)
            self.memory = read = begun + _service(instruction)
            if name == 'LDG':
                done = begun + GLOBAL
            elif name == 'LDL':
                done = begun + LOCAL
            elif name == 'LDGSTS':
                done, warp.copies = begun + 20, max(warp.copies, begun + GLOBAL)
            elif name in STORES:
                done = begun + STORED
            else:
                done = self.memory + LATENCY.get(name, OTHER_GUARDED) - 7
        elif name == 'LDGDEPBAR':
            warp.groups.append(warp.copies)
        elif name == 'DEPBAR' and (kept := re.search(r'SB0,\s*0x([0-9a-f]+)', instruction.text)):
            count = max(len(warp.groups) - int(kept[1], 16), 0)
            time = max([time, *warp.groups[:count]])
            del warp.groups[:count]
        elif name == 'WARPGROUP' and 'DEPBAR' in instruction.modifiers:
            time = max(time, warp.product)
        if instruction.sets < SCOREBOARDS:
            warp.scoreboards[instruction.sets] = max(warp.scoreboards[instruction.sets], done)
        if instruction.frees < SCOREBOARDS:
            warp.scoreboards[instruction.frees] = max(warp.scoreboards[instruction.frees], read)
        if name != 'HMMA' and name not in STORES and registers:
            warp.results.pop(registers[0], None)
        return time

    def _meet(self, warp: _Warp, number: int, time: float) -> None:
        arrived = self.arrived[warp.program]
        arrived.append((time, number))
        if len(arrived) < self.loop.warps:
            return
        past = max(t for t, _ in arrived) + BARRIER
        for _, other in arrived:
            met = self.warps[other]
            met.time = max(met.time, past)
            if met.iteration < ITERATIONS:
                self._queue(met.time, other)
        arrived.clear()


def cycles(loop: Loop, programs: int) -> float:
    """Cycles of an iteration in the steady state, with so many programs on a multiprocessor."""
    machine = _Multiprocessor(loop, programs)
    machine.run()
    starts = [warp.starts[WARM_UP:] for warp in machine.warps]
    return sum((s[-1] - s[0]) / (len(s) - 1) for s in starts) / len(starts)
