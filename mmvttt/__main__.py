"""`mmvttt TOOL …` runs a tool. `mmvttt` reports versions, patches, and usable kernels.

The same as `python -m mmvttt`. The report works on a broken installation: a package that cannot be
imported is a line of it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import platform
import sys
import warnings
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from . import __version__
from .cli import Parser, plain_errors, tool_name
from .distributions import overlaid
from .errors import suggest

# Tested versions by import name. Others may work, so these are not required.
_PACKAGES: dict[str, tuple[str, ...]] = {
    'torch': ('2.11', '2.14', '2.15'),
    'torchvision': (),
    'triton': (),
    'numba': (),
    'numpy': (),
    'cv2': (),
    'timm': (),
    'mmengine': ('0.10',),
    'mmcv': ('2.1', '2.3'),
    'mmdet': ('3.3', '3.5'),
    'mmseg': ('1.2', '1.4'),
    'mmpretrain': ('1.2', '1.3'),
}
# These are listed first, in this order.
_FREQUENT = ('finetune', 'predict', 'train', 'test', 'weights', 'export', 'check_data')


def _imported(module: str) -> tuple[str, str | None]:
    """The version of a module, and briefly why it cannot be imported."""
    try:
        # Toolboxes print deprecation warnings.
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return getattr(importlib.import_module(module), '__version__', '?'), None
    except Exception as error:
        return '?', f'{type(error).__name__}: {error}'.partition('\n')[0]


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return 'no GPU'
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f'CUDA {torch.version.cuda}, {", ".join(names)}'


def versions() -> list[str]:
    """A line for every relevant package, with a remark on untested versions."""
    gpus = _gpus() if _imported('torch')[1] is None else 'no torch'
    lines = [f'mmvttt {__version__}, Python {platform.python_version()}, {gpus}']
    # Forks have the same modules under other distribution names.
    installed = packages_distributions()
    for module, tried in _PACKAGES.items():
        providers = sorted(set(installed.get(module, ())))
        number, failure = _imported(module)
        if not providers and failure is not None:
            lines.append(f'{module:12} not installed')
            continue
        distributions = ', '.join(f'{name} {version(name)}' for name in providers)
        line = f'{module:12} {number} ({distributions or "no distribution"})'
        if failure is not None:
            line += f'  cannot be imported: {failure} (docs/faq.md)'
        # Toolboxes require different distributions of OpenCV.
        elif len(providers) > 1 and module != 'cv2':
            line += '  they share one folder: keep one of them'
        if failure is None and tried and '.'.join(number.split('.')[:2]) not in tried:
            line += f'  not tried yet; tried: {", ".join(tried)}'
        lines.append(line)
    return lines


def patch_lines(details: bool = False) -> list[str]:
    """One line for all patches, or with `details` one for each."""
    if find_spec('mmengine') is None:
        return ['none: OpenMMLab is not installed']
    try:
        from .openmmlab.compat import PATCHES, outcomes

        for patch in PATCHES:
            # A patch is applied once its module has been imported.
            _imported(patch.target)
        states = outcomes()
    except Exception as error:
        return [f'none: {error}']
    if details:
        return [f'{name:16} {unneeded or "applied"}' for name, unneeded in states.items()]
    applied = [*states.values()].count(None)
    return [f'{applied} of {len(states)} applied; --patches lists them']


def kernel_lines() -> list[str]:
    """A line for each op with its backends, and one for each reason why a backend cannot run."""
    try:
        from ttt_kernels import available
    except ImportError as error:
        return [f'none: {error}']
    lines: list[str] = []
    reasons: dict[str, None] = {}
    for op, backends in available().items():
        cells = (f'{name} {"no" if reason else "yes"}' for name, reason in backends.items())
        lines.append(f'{op:12} {", ".join(cells)}')
        # An op that lacks a backend is not the machine's fault.
        reasons |= {f'{n}: {r}': None for n, r in backends.items() if r and op not in r}
    return lines + list(reasons)


def tools() -> dict[str, Path]:
    """The tools by name, the frequent ones first."""
    package = Path(__file__).parent
    shipped, cloned = package / '.mim' / 'tools', package.parent / 'tools'
    folder = shipped if shipped.is_dir() else cloned
    # The shell's, but for what they share.
    files = [*folder.glob('*.py'), *folder.glob('[!_]*.sh')]
    by_name = {tool_name(path.with_suffix('.py')): path for path in files}
    rest = sorted(by_name.keys() - set(_FREQUENT))
    return {name: by_name[name] for name in (*_FREQUENT, *rest) if name in by_name}


def tool_lines() -> list[str]:
    """A line for each tool: its name, and the first sentence of its file."""
    lines = []
    for name, path in tools().items():
        text = path.read_text(encoding='utf-8')
        if path.suffix == '.py':
            text = ast.get_docstring(ast.parse(text)) or ''
        else:
            text = text.splitlines()[1].removeprefix('# ')
        lines.append(f'  {name:20}{text.partition(chr(10))[0]}')
    return lines


def run_tool(name: str, arguments: list[str]) -> None:
    """Becomes `python tools/NAME.py ARGUMENTS`, or `bash tools/NAME.sh ARGUMENTS`."""
    by_name = tools()
    path = by_name.get(name.replace('-', '_'))
    if path is None:
        advice = suggest(name, by_name) or f'; it has {", ".join(by_name)}'
        sys.exit(f'error: mmvttt has no tool {name!r}{advice}')
    if path.suffix == '.sh':
        os.environ.setdefault('PYTHON', sys.executable)
        os.execvp('bash', ['bash', str(path), *arguments])
    os.execv(sys.executable, [sys.executable, str(path), *arguments])


def main(argv: list[str] | None = None) -> None:
    """Runs a tool, or prints the report: status 1 if two OpenMMLabs are installed."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith('-'):
        run_tool(argv[0], argv[1:])
        return
    parser = Parser(
        prog='mmvttt',
        usage='mmvttt [--patches | --version] | mmvttt TOOL [OPTIONS]',
        description=__doc__,
        epilog='\n'.join(['`mmvttt TOOL --help` has the options of a tool:', *tool_lines()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--patches', action='store_true', help='every patch, and why it is not applied'
    )
    parser.add_argument('--version', action='version', version=f'mmvttt {__version__}')
    args = parser.parse_args(argv)
    with plain_errors():
        print('\n'.join(versions()))
        print('\nPatches (docs/patches.md)', *patch_lines(args.patches), sep='\n')
        print('\nKernels', *kernel_lines(), sep='\n')
    if (problem := overlaid()) is not None:
        sys.exit(f'error: {problem}')


if __name__ == '__main__':
    main()
