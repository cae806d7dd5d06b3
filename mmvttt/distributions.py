"""Finds out which OpenMMLab is installed: the original packages, or forks with the same imports.

Reads only metadata, so it works if the packages themselves cannot be imported.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Distributions by the module that they provide, the fork last.
PROVIDERS: dict[str, tuple[str, ...]] = {
    'mmengine': ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
    'mmcv': ('mmcv', 'mmcv-lite', 'mmcv-full', 'onedl-mmcv'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
}
# The toolbox's part in the names of our extras.
_EXTRAS = {'mmdet': 'det', 'mmseg': 'seg', 'mmpretrain': 'pretrain'}


def is_installed(distribution: str) -> bool:
    """Whether a distribution of that name is installed."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def providers(module: str) -> list[str]:
    """The installed distributions that provide a module of `PROVIDERS`."""
    return [name for name in PROVIDERS[module] if is_installed(name)]


def extra(toolbox: str) -> str | None:
    """The extra of mmvttt that installs a toolbox for the present OpenMMLab, or None."""
    if toolbox not in _EXTRAS:
        return None
    original = any(is_installed(name) for m in ('mmengine', 'mmcv') for name in PROVIDERS[m][:-1])
    return f'{"" if original else "onedl-"}{_EXTRAS[toolbox]}'


# The extra that brings a package, by the name of its module.
_BRINGS = {
    'onnx': 'export', 'onnxscript': 'export', 'onnxruntime': 'export', 'openvino': 'openvino',
    'matplotlib': 'plots', 'diffusers': 'gen', 'transformers': 'sd3',
    'supervision': 'predict', 'numba': 'cpu', 'sklearn': 'demo', 'skimage': 'demo',
}  # fmt: skip


def missing(module: str) -> str | None:
    """A sentence with the extra that brings a module that is missing, or None for other modules."""
    package = module.partition('.')[0]
    if package in ('mmengine', 'mmcv', 'cv2', 'rich'):
        return (
            "OpenMMLab is not installed: pip install 'mmvttt[onedl-det]' for detection, onedl-seg "
            'for segmentation, onedl-pretrain for classification (the original packages: '
            'docs/installation.md)'
        )
    name = extra(package) or _BRINGS.get(package)
    return name and f"{package} is not installed: pip install 'mmvttt[{name}]'"


def require(module: str) -> Any:
    """Imports a module that an extra brings; without it a ModuleNotFoundError names the extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing(module), name=module) from error


def overlaid() -> str | None:
    """An error with its remedy if two distributions provide one module, else None.

    pip silently installs the second over the first, and removing one removes files of the other.
    """
    installed = {module: providers(module) for module in PROVIDERS}
    twice = [
        f'{module} ({" and ".join(f"{name} {version(name)}" for name in names)})'
        for module, names in installed.items()
        if len(names) > 1
    ]
    if not twice:
        return None
    toolboxes = [_EXTRAS[module] for module in _EXTRAS if installed[module]] or ['det']
    every = ' '.join(name for names in installed.values() for name in names)
    return (
        f'two distributions lie over one another: {", ".join(twice)}. Keep one OpenMMLab: pip '
        f'uninstall -y {every}, and then the maintained forks, pip install '
        f"'mmvttt[{','.join(f'onedl-{name}' for name in toolboxes)}]', or the original packages, "
        f"pip install 'mmvttt[{','.join(['lite', *toolboxes])}]'"
    )
