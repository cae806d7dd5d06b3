"""`python -m ttt_kernels`: backends of every op and verdicts; `check OP` forgets its verdicts."""

import argparse
import time

from . import _check
from ._backend import OPS, available


def report() -> str:
    """One line for each op and backend: whether it can run here; then the verdicts."""
    lines = []
    for op, backends in available().items():
        for backend, reason in backends.items():
            verdict = 'can run' if reason is None else f'cannot run: {reason}'
            lines.append(f'{op:<12} {backend:<10} {verdict}')
    lines += [_line(verdict) for _, verdict in _check.verdicts()]
    return '\n'.join(lines)


def _line(verdict: dict) -> str:
    """A kernel's check of itself that the user's cache holds."""
    days = (time.time() - verdict['time']) / 86400
    what = f'{verdict["op"]:<12} {verdict["dtype"]:<10} on {verdict["gpu"]}'
    sources = '' if verdict['sources'] == _check.sources(verdict['op']) else ', other sources'
    about = f'Triton {verdict["triton"]}{sources}, checked {days:.1f} days ago'
    return f'{what}, {about}: {verdict["verdict"]}'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser('python -m ttt_kernels', description='What can run here.')
    check = parser.add_subparsers(dest='command').add_parser(
        'check', help="delete an op's verdicts: its next calls are checked again"
    )
    check.add_argument('op', choices=OPS)
    args = parser.parse_args(arguments)
    if args.command == 'check':
        for path, verdict in _check.verdicts():
            if verdict['op'] == args.op:
                print('deleted:', _line(verdict))
                path.unlink()
        return 0
    print(report())
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
