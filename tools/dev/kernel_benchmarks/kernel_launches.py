"""Catches the launches of Triton kernels: compiles them for a GPU that need not be there.

The ops run as they are, strides, plans and grids included; what happens instead of a launch is up
to the caller. The tests' emulator and the cycle model stand on it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ttt_kernels import _backend

Instead = Callable[[JITFunction, CompiledKernel, tuple[int, int, int], dict[str, object]], object]


class Launch(NamedTuple):
    """One launch, which can be made again while its tensors live."""

    kernel: JITFunction
    compiled: CompiledKernel
    grid: tuple[int, int, int]
    arguments: dict[str, object]

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def again(self) -> object:
        return self.kernel[self.grid](**self.arguments)


class _NoGpu:
    """The device queries that Triton makes before a launch."""

    def __init__(self, arch: int | str) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        amd = isinstance(self.arch, str)
        return GPUTarget('hip' if amd else 'cuda', self.arch, 64 if amd else 32)

    def get_current_device(self) -> int | str:
        return self.arch  # Triton caches what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_for(arch: int | str, instead: Instead) -> Iterator[None]:
    """Launches inside compile for `arch` and call `instead(kernel, compiled, grid, …)`.

    `arch` is 80, 90, … for GPUs of NVIDIA, and a name such as 'gfx942' for those of AMD.

    Its last argument is the values of the kernel's parameters by name. `backend='triton'` takes
    tensors of the CPU and of 'meta'.
    """

    def run(self: JITFunction, *args, grid, warmup, **kwargs):
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if callable(grid):
            grid = grid(arguments)
        if not warmup:
            instead(self, compiled, (*grid, 1, 1)[:3], arguments)
        return compiled

    launch = JITFunction.run
    amd = isinstance(arch, str)
    capability = (9, 4) if amd else divmod(arch, 10)
    with (
        mock.patch.object(torch.version, 'hip', '7.0' if amd else None),
        mock.patch.object(driver, '_active', _NoGpu(arch), create=True),
        mock.patch.object(JITFunction, 'run', run),
        mock.patch.object(torch.cuda, 'get_device_capability', return_value=capability),
        mock.patch.object(_backend, '_unreachable', return_value=None),
    ):
        yield


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside take place, and are in the list that this yields."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args, grid, warmup, **kwargs):
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        shape = grid(arguments) if callable(grid) else grid
        compiled = launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        launches.append(Launch(self, compiled, (*shape, 1, 1)[:3], arguments))
        return compiled

    launch = JITFunction.run
    with mock.patch.object(JITFunction, 'run', run):
        yield launches
