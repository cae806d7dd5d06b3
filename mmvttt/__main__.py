"""`python -m mmvttt`: the versions here, what was patched and why, and which kernels can run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ttt_kernels import available

from . import __version__
from .compat import patches

# By import name, the distributions that can bring it: the forks have names of their own.
_PACKAGES = {
    'torch': ('torch',),
    'torchvision': ('torchvision',),
    'triton': ('triton',),
    'numpy': ('numpy',),
    'cv2': ('opencv-python-headless', 'opencv-python'),
    'timm': ('timm',),
    'mmengine': ('mmengine', 'onedl-mmengine', 'mmengine-lite'),
    'mmcv': ('mmcv', 'onedl-mmcv', 'mmcv-lite'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
}
# What has been run; other versions may work, which is why nothing asserts them.
_TRIED = {
    'torch': ('2.11', '2.14'),
    'mmengine': ('0.10',),
    'mmcv': ('2.1', '2.3'),
    'mmdet': ('3.3', '3.5'),
    'mmseg': ('1.2', '1.4'),
    'mmpretrain': ('1.2', '1.3'),
}


def _installed(names: tuple[str, ...]) -> tuple[str, str] | None:
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def versions() -> list[str]:
    """A line for every package that matters, with a word about versions nobody has tried."""
    gpu = 'no GPU'
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        gpu = f'CUDA {torch.version.cuda}, {", ".join(names)}'
    lines = [f'mmvttt {__version__}, Python {platform.python_version()}, {gpu}']
    for module, names in _PACKAGES.items():
        found = _installed(names)
        if found is None:
            lines.append(f'{module:12} not installed')
            continue
        name, number = found
        line = f'{module:12} {number}'
        if name != module:
            line += f' ({name})'
        tried = _TRIED.get(module, ())
        if tried and '.'.join(number.split('.')[:2]) not in tried:
            line += f'  not tried yet; tried: {", ".join(tried)}'
        lines.append(line)
    return lines


def main() -> None:
    """Prints the report."""
    print('\n'.join(versions()))
    print('\nPatches')
    for m in patches():
        outcome = 'patched' if m.applied else f'not needed: {m.unneeded}'
        print(f'{m.name:14} {outcome}\n{"":14} {m.why}')
    print('\nKernels')
    for op, backends in available().items():
        for backend, reason in backends.items():
            print(f'{op:14} {backend:10} {"yes" if reason is None else f"no: {reason}"}')


if __name__ == '__main__':
    main()
