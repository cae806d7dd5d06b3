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
from torch.torch_version import TorchVersion

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
# That of the oldest torch in setup.py.
_OLDEST_TRITON = (3, 6)
VARIABLE = 'TTT_KERNELS_BACKEND'


def resolve(op: str, backend: str | None) -> str:
    """The `backend` argument of an op as the registered op takes it.

    None leaves the choice to the environment variable TTT_KERNELS_BACKEND, and to `choose` if that
    is unset or names a backend that `op` does not have.
    """
    name, chosen = 'backend', backend
    if backend is None:
        name, chosen = VARIABLE, os.environ.get(VARIABLE) or None
    if chosen is None:
        return 'auto'
    if chosen not in BACKENDS:
        raise ValueError(
            f"{name}={chosen!r}: choose one of None, 'triton', 'numba', 'reference'; None picks "
            'the Triton kernel on a GPU, the numba kernel on a CPU, where they can run, and the '
            'reference elsewhere'
        )
    return 'auto' if backend is None and (op, chosen) in _LACKING else chosen


def triton_version() -> TorchVersion:
    """Version of the Triton that compiles the kernels, which compares with tuples."""
    import triton

    return TorchVersion(triton.__version__)


@functools.cache
def load_kernel(op: str, backend: str = 'triton') -> ModuleType | str:
    """Imports the module of an op's kernels once, or returns as a string why that fails."""
    name = f'{__package__}.{op}.{_MODULES[backend]}'
    if importlib.util.find_spec(name) is None:
        return f'this version has no {_NAMES[backend]} kernel for {op}'
    if backend == 'numba' and importlib.util.find_spec('numba') is None:
        return "numba is not installed; `pip install 'mmvttt[cpu]'` makes the op faster on a CPU"
    try:
        if backend == 'triton' and triton_version() < _OLDEST_TRITON:
            oldest = '.'.join(map(str, _OLDEST_TRITON))
            return f'Triton {triton_version()} is too old; the kernels need {oldest} or newer'
        return importlib.import_module(name)
    except Exception as error:  # a broken Triton raises errors of any type
        return f'its kernel cannot be imported ({type(error).__name__}: {error})'


def interpreting() -> bool:
    """True if Triton kernels run in the interpreter, which also takes tensors in host memory."""
    return os.environ.get('TRITON_INTERPRET', '0') == '1'


@functools.cache
def _no_launches() -> str | None:
    """Reason why Triton cannot launch kernels on this machine's GPUs, or None."""
    if interpreting():
        return None
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # no C compiler, no headers of Python, no libcuda
        return f'Triton cannot start ({type(error).__name__}: {error})'
    return None


def _too_old(device: torch.device) -> str | None:
    if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
        return None
    return 'the kernels need compute capability 8.0 or more'


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
    op: str,
    backend: str,
    tensor: Tensor,
    unsupported_reason: Callable[[ModuleType], str | None],
    check: Callable[[ModuleType], str | None],
) -> ModuleType | None:
    """The kernel module to run on `tensor`'s device, or None for the reference.

    Args:
        backend: 'auto' or one of BACKENDS.
        unsupported_reason: Why a kernel module cannot run with these inputs, or None.
        check: Why it must not: what it computes on this GPU is wrong, or could not be compared.
    """
    name = backend
    if backend == 'auto':
        name = {'cuda': 'triton', 'cpu': 'numba'}.get(tensor.device.type, 'reference')
    if name == 'reference':
        return None
    kernel = load_kernel(op, name)
    if isinstance(kernel, str):
        reason = kernel
    else:
        reason = _unreachable(name, tensor.device) or unsupported_reason(kernel)
        if reason is None and tensor.device.type == 'cuda' and not interpreting():
            reason = check(kernel)
        if reason is None:
            return kernel
    if backend != 'auto':
        raise RuntimeError(
            f'{op}: backend={backend!r} cannot run here: {reason}; leave backend=None, or use '
            "backend='reference'"
        )
    if name == 'triton' and tensor.numel() > 0:
        _warn_once(op, reason)
    return None


def available() -> dict[str, dict[str, str | None]]:
    """Reasons why backends cannot run on this machine, by op, or None if they can.

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
