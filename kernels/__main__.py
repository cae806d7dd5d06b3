"""`python -m ttt_kernels`: versions, backends of every op, verdicts; `check OP` repeats checks.

python -m ttt_kernels check ttt_glu --dtype bf16
"""

import argparse
import importlib.metadata
import platform
import time

import torch

from . import _check
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
    what = f'{verdict["op"]:<12} {verdict["dtype"]:<10} on {verdict["gpu"]}'
    tokens = 'x'.join(map(str, verdict['request']['args'][0]['shape']))
    sources = '' if verdict['sources'] == _check.sources(verdict['op']) else ', other sources'
    about = f'{tokens}, Triton {verdict["triton"]}{sources}, checked {days:.1f} days ago'
    return f'{what}, {about}: {verdict["verdict"]}'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser('python -m ttt_kernels', description='What can run here.')
    check = parser.add_subparsers(dest='command').add_parser(
        'check', help="repeat the checks that an op's Triton kernels have had here"
    )
    check.add_argument('op', choices=OPS)
    check.add_argument('--dtype', nargs='+', choices=DTYPES, default=list(DTYPES))
    args = parser.parse_args(arguments)
    if args.command == 'check':
        status = 3
        dtypes = tuple(str(DTYPES[name]).removeprefix('torch.') for name in args.dtype)
        for kept, verdict in _check.again(args.op, dtypes):
            print(_line(kept | {'verdict': verdict, 'time': time.time()}))
            status = max(status % 3, verdict != _check.AGREES)
        if status == 3:
            print(f'{args.op}: no kernel has been checked here; a model that runs does so')
        return status
    print(report())
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
