"""Which implementation of an op runs: its Triton kernel where it can, its reference elsewhere."""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

OPS = ('ttt_linear', 'ttt_glu', 'ttt_dwconv', 'ttt_mlp', 'deform_attn')
BACKENDS = ('triton', 'reference')
VARIABLE = 'TTT_KERNELS_BACKEND'


def resolve(backend: str | None) -> str:
    """The `backend` argument of an op as the string that travels through its registration.

    None leaves the choice to the environment variable TTT_KERNELS_BACKEND, for those who cannot
    reach the call, and without it to `choose`.

    Raises:
        ValueError: `backend`, or the variable, is not None, 'triton' or 'reference'.
    """
    name = 'backend'
    if backend is None:
        name, backend = VARIABLE, os.environ.get(VARIABLE) or None
    if backend is None:
        return 'auto'
    if backend not in BACKENDS:
        raise ValueError(
            f"{name} must be None, 'triton' or 'reference', got {backend!r}; None picks the "
            'Triton kernel on a GPU where it can run and the reference elsewhere'
        )
    return backend


@functools.cache
def load_kernel(op: str) -> ModuleType | str:
    """The Triton module of an op, imported on first use, or why there is none."""
    name = f'{__package__}.{op}.kernel'
    if importlib.util.find_spec(name) is None:
        return f'this version has no Triton kernel for {op}'
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken Triton raises nearly anything
        return f'its kernel cannot be imported ({type(error).__name__}: {error})'


def interpreting() -> bool:
    """Whether Triton kernels run in the interpreter, which also takes tensors in host memory."""
    return os.environ.get('TRITON_INTERPRET', '0') == '1'


def _unreachable(device: torch.device) -> str | None:
    if device.type == 'cuda' or (device.type == 'cpu' and interpreting()):
        return None
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
    op: str, backend: str, tensor: Tensor, supported: Callable[[ModuleType], str | None]
) -> ModuleType | None:
    """The kernel module to run on `tensor`'s device, or None for the reference.

    Args:
        backend: 'auto', 'triton' or 'reference'.
        supported: asks a loaded kernel module whether it takes these inputs; None means yes.

    Raises:
        RuntimeError: `backend` is 'triton' and the kernel cannot run.
    """
    if backend == 'reference' or (backend == 'auto' and tensor.device.type != 'cuda'):
        return None
    kernel = load_kernel(op)
    if isinstance(kernel, str):
        reason = kernel
    else:
        reason = _unreachable(tensor.device) or supported(kernel)
        if reason is None:
            return kernel
    if backend == 'triton':
        raise RuntimeError(
            f"{op}: backend='triton' cannot run here: {reason}; leave backend=None, or use "
            "backend='reference'"
        )
    _warn_once(op, reason)
    return None


def available() -> dict[str, dict[str, str | None]]:
    """For every op, what each backend lacks to run on this machine: None where it can run.

    Returns:
        {op: {'triton': reason or None, 'reference': None}}.
    """
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    report = {}
    for op in OPS:
        kernel = load_kernel(op)
        reason = kernel if isinstance(kernel, str) else None
        if reason is None and device.type == 'cpu' and not interpreting():
            reason = (
                'torch sees no GPU; for a test without one, set TRITON_INTERPRET=1 before Python '
                'starts'
            )
        report[op] = {'triton': reason, 'reference': None}
    return report
