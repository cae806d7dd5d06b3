"""Sends the launches of Triton kernels to the emulator: compiled for real, with real strides."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from kernel_launches import compiled_for
from triton.runtime.jit import JITFunction

from .machine import Machine
from .memory import GlobalMemory
from .program import parse

# Programs in one machine: NumPy's price of an instruction is shared, and caches are finite.
TOGETHER = 16


@contextlib.contextmanager
def emulated(arch: int, *, copies_land_late: bool = True) -> Iterator[Counter[str]]:
    """Launches inside run in the emulator, compiled for `arch` (80, 90), on tensors of the CPU.

    Asynchronous copies land as late as their wait allows, or at once.

    Yields:
        Programs that ran, by kernel.
    """
    ran: Counter[str] = Counter()
    programs = {}

    def run(function: JITFunction, compiled, grid: tuple[int, ...], arguments: dict) -> None:
        if compiled.hash not in programs:
            programs[compiled.hash] = parse(compiled.asm['ptx'])
        program = programs[compiled.hash]
        passed = [
            (name, x)
            for name in function.arg_names
            for x in _passed(arguments[name], compiled.src.signature[name])
        ]
        scratch = torch.zeros(16, dtype=torch.uint8)
        tensors = [(n, x) for n, x in passed if isinstance(x, torch.Tensor)]
        memory = GlobalMemory([*tensors, ('scratch', scratch)])
        # Behind the arguments Triton passes two buffers, which these kernels do not use.
        values = [_bits(x) for _, x in passed] + [scratch.data_ptr()] * 2
        names = [name for name, _ in program.parameters]
        coordinates = np.array(
            [at[::-1] for at in itertools.product(*(range(n) for n in reversed(grid)))], np.uint32
        )
        with np.errstate(all='ignore'):
            for first in range(0, len(coordinates), TOGETHER):
                Machine(
                    program,
                    dict(zip(names, values, strict=True)),
                    coordinates[first : first + TOGETHER],
                    32 * compiled.metadata.num_warps,
                    max(compiled.metadata.shared, 16),
                    memory,
                    copies_land_late,
                ).run()
        ran[function.__name__] += len(coordinates)

    with compiled_for(arch, run):
        yield ran


def _passed(value: object, kind: str | tuple) -> list[object]:
    """Arguments that a launch passes: without constants compiled in, tuples element by element."""
    if isinstance(kind, tuple):
        return [x for v, k in zip(value, kind, strict=True) for x in _passed(v, k)]
    return [] if kind == 'constexpr' else [value]


def _bits(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return int(value) & ((1 << 64) - 1)
