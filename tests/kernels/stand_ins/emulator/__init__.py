"""Executes what Triton compiled, its PTX, on a CPU: NumPy, all programs of a launch in lockstep.

The interpreter runs a kernel's source; this runs the compiler's result: layouts, shared memory,
barriers, tensor cores and the roundings of bf16, fp16 and tf32. An error of these is raised where
it happens, with the line of PTX and of the kernel's source:

- an access to global memory outside of every tensor of the launch, or misaligned;
- two warps that touch the same bytes of shared memory with no barrier between, one of them writing;
- a WGMMA that reads what threads stored or copied to shared memory with no proxy fence between;
- a register or bytes of shared memory that are read before anything wrote them;
- a branch that the threads of a program take differently, where Triton never means one.

What the assembler makes of the PTX stays invisible, and so does time. `launch.emulated` sends the
launches of Triton kernels here.
"""

from .launch import emulated
from .machine import EmulationError

__all__ = ['EmulationError', 'emulated']
