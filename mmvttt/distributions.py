"""Finds out which OpenMMLab is installed: the original packages, or forks with the same imports.

Reads only metadata, so it works if the packages themselves cannot be imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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
    """The extra of mmvttt that installs a toolbox for the present OpenMMLab.

    Args:
        toolbox: 'mmdet', 'mmseg' or 'mmpretrain'; None is returned for another module.
    """
    if toolbox not in _EXTRAS:
        return None
    fork = any(is_installed(PROVIDERS[module][-1]) for module in ('mmengine', 'mmcv'))
    return f'{"onedl-" if fork else ""}{_EXTRAS[toolbox]}'


def overlaid() -> str | None:
    """An error with its remedy if two distributions provide one module, else None.

    pip silently installs the second over the first, and removing one removes files of the other.
    """
    found = {module: providers(module) for module in PROVIDERS}
    twice = [
        f'{module} ({" and ".join(f"{name} {version(name)}" for name in names)})'
        for module, names in found.items()
        if len(names) > 1
    ]
    if not twice:
        return None
    toolboxes = [_EXTRAS[module] for module in _EXTRAS if found[module]] or ['det']
    every = ' '.join(name for names in found.values() for name in names)
    return (
        f'two distributions lie over one another: {", ".join(twice)}. Keep one OpenMMLab: pip '
        f'uninstall -y {every}, and then the original packages, pip install '
        f"'mmvttt[{','.join(['lite', *toolboxes])}]', or the maintained forks, pip install "
        f"'mmvttt[{','.join(f'onedl-{name}' for name in toolboxes)}]'"
    )
