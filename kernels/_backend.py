"""Chooses the implementation of an op: Triton on a GPU, numba on a CPU, else its reference."""

import functools
import importlib
import importlib.util
import os
import pkgutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
# Every folder of this package is an op.
OPS = tuple(m.name for m in pkgutil.iter_modules([str(_FOLDER)]) if m.ispkg)
# The module of an op's folder that holds its kernels.
_MODULES = {'triton': 'kernel', 'numba': '_numba'}
_NAMES = {'triton': 'Triton', 'numba': 'numba'}
BACKENDS = (*_MODULES, 'reference')
# Ops and backends for which this version has no kernel.
_LACKING = {
    (op, backend)
    for op in OPS
    for backend, module in _MODULES.items()
    if module not in (m.name for m in pkgutil.iter_modules([str(_FOLDER / op)]))
}
VARIABLE = 'TTT_KERNELS_BACKEND'


def resolve(op: str, backend: str | None) -> str:
    """Checks the `backend` argument of an op and returns it as a string for the registered op.

    None leaves the choice to the environment variable TTT_KERNELS_BACKEND, for callers who cannot
    reach the argument. Where that is not set, or names a backend for which `op` has no kernel at
    all, `choose` decides.

    Raises:
        ValueError: `backend`, or the variable, is not None or one of BACKENDS.
    """
    name, wanted = 'backend', backend
    if backend is None:
        name, wanted = VARIABLE, os.environ.get(VARIABLE) or None
    if wanted is None:
        return 'auto'
    if wanted not in BACKENDS:
        raise ValueError(
            f"{name} must be None, 'triton', 'numba' or 'reference', got {wanted!r}; None picks "
            'the Triton kernel on a GPU, the numba kernel on a CPU, where they can run, and the '
            'reference elsewhere'
        )
    return 'auto' if backend is None and (op, wanted) in _LACKING else wanted


@functools.cache
def load_kernel(op: str, backend: str = 'triton') -> ModuleType | str:
    """Imports the module of an op's kernels, once; a string is the reason why there is none."""
    name = f'{__package__}.{op}.{_MODULES[backend]}'
    if importlib.util.find_spec(name) is None:
        return f'this version has no {_NAMES[backend]} kernel for {op}'
    if backend == 'numba' and importlib.util.find_spec('numba') is None:
        return 'numba is not installed; `pip install numba` makes the op faster on a CPU'
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken Triton raises nearly anything
        return f'its kernel cannot be imported ({type(error).__name__}: {error})'


def interpreting() -> bool:
    """True where Triton kernels run in the interpreter, which also takes tensors in host memory."""
    return os.environ.get('TRITON_INTERPRET', '0') == '1'


@functools.cache
def _no_launches() -> str | None:
    """Reason why Triton launches nothing on the GPUs of this machine, or None."""
    if interpreting():
        return None
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # no C compiler, no headers of Python, no libcuda
        return f'Triton cannot start ({type(error).__name__}: {error})'
    return None


def _too_old(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8 and not torch.version.hip:
        return f'the GPU has compute capability {major}.{minor}; the kernels need 8.0 or more'
    return None


def _unreachable(backend: str, device: torch.device) -> str | None:
    if backend == 'numba':
        if device.type == 'cpu':
            return None
        return f'the tensors are on {device.type!r}; numba kernels run on a CPU'
    if interpreting() and device.type in ('cpu', 'cuda'):
        return None
    if device.type == 'cuda':
        return _no_launches() or _too_old(device)
    return (
        f'the tensors are on {device.type!r}; Triton kernels need a GPU, or TRITON_INTERPRET=1 in '
        'the environment before Python starts'
    )


@functools.cache
def _warn_once(op: str, reason: str) -> None:
    warnings.warn(
        f'{op} runs its slow reference on the GPU: {reason}', RuntimeWarning, stacklevel=2
    )


def choose(
    op: str, backend: str, tensor: Tensor, unsupported_reason: Callable[[ModuleType], str | None]
) -> ModuleType | None:
    """The kernel module to run on `tensor`'s device, or None for the reference.

    Args:
        backend: 'auto' or one of BACKENDS.
        unsupported_reason: reason why a loaded kernel module cannot run with these inputs; None
            where it can.

    Raises:
        RuntimeError: `backend` is 'triton' or 'numba' and that kernel cannot run.
    """
    wanted = backend
    if backend == 'auto':
        wanted = {'cuda': 'triton', 'cpu': 'numba'}.get(tensor.device.type, 'reference')
    if wanted == 'reference':
        return None
    kernel = load_kernel(op, wanted)
    if isinstance(kernel, str):
        reason = kernel
    else:
        reason = _unreachable(wanted, tensor.device) or unsupported_reason(kernel)
        if reason is None:
            return kernel
    if backend != 'auto':
        raise RuntimeError(
            f'{op}: backend={backend!r} cannot run here: {reason}; leave backend=None, or use '
            "backend='reference'"
        )
    if wanted == 'triton':
        _warn_once(op, reason)
    return None


def available() -> dict[str, dict[str, str | None]]:
    """Reasons why backends cannot run on this machine, by op; None where they can.

    Returns:
        {op: {'triton': reason or None, 'numba': reason or None, 'reference': None}}.
    """
    no_gpu = None
    if not (torch.cuda.is_available() or interpreting()):
        no_gpu = (
            'torch sees no GPU; for a test without one, set TRITON_INTERPRET=1 before Python starts'
        )
    elif not interpreting():
        no_gpu = _unreachable('triton', torch.device('cuda'))
    report = {}
    for op in OPS:
        reasons = {}
        for backend, missing in (('triton', no_gpu), ('numba', None)):
            kernel = load_kernel(op, backend)
            reasons[backend] = kernel if isinstance(kernel, str) else missing
        report[op] = {**reasons, 'reference': None}
    return report
