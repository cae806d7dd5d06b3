"""`python -m ttt_kernels`: versions, backends of every op, verdicts; `check OP` compares a kernel.

python -m ttt_kernels check ttt_glu --dtype bf16
"""

import argparse
import importlib.metadata
import platform
import time

import torch

from . import _check, _compare
from ._backend import OPS, available, refusals
from ._known import DTYPES


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 'not installed'


def report() -> str:
    """Versions, the GPU, and one line for each op and backend: whether it can run here."""
    gpu = 'none'
    if torch.cuda.is_available():
        capability = '.'.join(map(str, torch.cuda.get_device_capability()))
        hip = torch.version.hip
        about = f'ROCm {hip}' if hip else f'compute capability {capability}'
        gpu = f'{torch.cuda.get_device_name()} ({about})'
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
    lines += [_line(verdict) for verdict in _check.verdicts()]
    return '\n'.join(lines)


def _line(verdict: dict) -> str:
    """A kernel's check of itself that the user's cache holds."""
    days = (time.time() - verdict['time']) / 86400
    result = 'passed' if verdict['reason'] is None else verdict['reason']
    what = f'{verdict["op"]:<12} {verdict["dtype"]:<10} on {verdict["gpu"]}'
    return f'{what}, Triton {verdict["triton"]}, checked {days:.1f} days ago: {result}'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser('python -m ttt_kernels', description='What can run here.')
    check = parser.add_subparsers(dest='command').add_parser(
        'check', help="compare an op's Triton kernel with the reference in fp64"
    )
    check.add_argument('op', choices=OPS)
    check.add_argument('--dtype', nargs='+', choices=DTYPES, default=list(DTYPES))
    check.add_argument('--device', default='cuda')
    args = parser.parse_args(arguments)
    if args.command == 'check':
        return _compare.main(args.op, args.dtype, args.device)
    print(report())
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
