"""`python -m ttt_kernels` prints versions, and which backends of every op run here or why not."""

import importlib.metadata
import platform

import torch

from ._backend import available, refusals


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 'not installed'


def report() -> str:
    """Versions, the GPU, and one line for each op and backend: whether it can run here."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        about = f'compute capability {major}.{minor}'
        if torch.version.hip:
            about = f'ROCm {torch.version.hip}: the Triton kernels compile for AMD GPUs, untested'
        gpu = f'{torch.cuda.get_device_name()} ({about})'
    else:
        gpu = 'none'
    versions = {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'triton': _version('triton'),
        'numba': _version('numba'),
        'GPU': gpu,
    }
    lines = [f'{name:<12} {value}' for name, value in versions.items()]
    for op, backends in available().items():
        for backend, reason in backends.items():
            verdict = 'can run' if reason is None else f'cannot run: {reason}'
            lines.append(f'{op:<12} {backend:<10} {verdict}')
            if (backend, reason) == ('triton', None):
                lines += [
                    f'{op:<12} {backend:<10} cannot run in {" and ".join(dtypes)}: {why}'
                    for dtypes, why in refusals(op)
                ]
    return '\n'.join(lines)


if __name__ == '__main__':
    print(report())
