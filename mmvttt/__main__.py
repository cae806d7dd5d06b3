"""`python -m mmvttt`: what is imported here, what was patched and why, which kernels can run.

It works where something else does not: what cannot be imported is a line of the report.
"""

from __future__ import annotations

import importlib
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version

from . import __version__, _failure

# By import name, the distributions that can bring it: the forks have names of their own.
_PACKAGES = {
    'torch': ('torch',),
    'torchvision': ('torchvision',),
    'triton': ('triton',),
    'numba': ('numba',),
    'numpy': ('numpy',),
    'cv2': ('opencv-python-headless', 'opencv-python'),
    'timm': ('timm',),
    'mmengine': ('mmengine', 'onedl-mmengine', 'mmengine-lite'),
    'mmcv': ('mmcv', 'onedl-mmcv', 'mmcv-lite'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
}
# Versions that were tried; others may work, so nothing asserts them.
_TRIED = {
    'torch': ('2.11', '2.14'),
    'mmengine': ('0.10',),
    'mmcv': ('2.1', '2.3'),
    'mmdet': ('3.3', '3.5'),
    'mmseg': ('1.2', '1.4'),
    'mmpretrain': ('1.2', '1.3'),
}


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _imported(module: str) -> tuple[str, str | None]:
    """The version of a module, and in a few words why it cannot be imported."""
    try:
        # Toolboxes warn about their own past.
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
    """A line for every package that matters, with a note on versions that were not tried."""
    gpus = _gpus() if _imported('torch')[1] is None else 'no torch'
    lines = [f'mmvttt {__version__}, Python {platform.python_version()}, {gpus}']
    for module, names in _PACKAGES.items():
        found = _installed(names)
        number, failure = _imported(module)
        if not found and failure is not None:
            lines.append(f'{module:12} not installed')
            continue
        distributions = ', '.join(f'{name} {its}' for name, its in found.items())
        line = f'{module:12} {number} ({distributions or "no distribution of a known name"})'
        if failure is not None:
            line += f'  cannot be imported: {failure}'
        elif len(found) > 1:
            line += '  they share one folder: keep one of them'
        tried = _TRIED.get(module, ())
        if failure is None and tried and '.'.join(number.split('.')[:2]) not in tried:
            line += f'  not tried yet; tried: {", ".join(tried)}'
        lines.append(line)
    return lines


def _patches() -> list[str]:
    if _failure is not None:
        return [f'none: {_failure}']
    from .compat import patches

    lines = []
    for m in patches():
        outcome = 'patched' if m.applied else f'not applied: {m.unneeded}'
        lines += [f'{m.name:16} {outcome}', f'{"":16} {m.why}']
    return lines


def _kernels() -> list[str]:
    try:
        from ttt_kernels import available
    except ImportError as error:
        return [f'none: {error}']
    return [
        f'{op:14} {backend:10} {"yes" if reason is None else f"no: {reason}"}'
        for op, backends in available().items()
        for backend, reason in backends.items()
    ]


def main() -> None:
    """Prints the report."""
    print('\n'.join(versions()))
    print('\nPatches (docs/patches.md)', *_patches(), sep='\n')
    print('\nKernels', *_kernels(), sep='\n')


if __name__ == '__main__':
    main()
