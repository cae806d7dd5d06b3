"""Small, named patches that keep one code base working across OpenMMLab, torch and mmcv builds.

Each patch does nothing where nothing is broken, and imports no toolbox: what concerns mmcv or
mmpretrain waits until somebody imports them. None changes the numbers of a training.
`python -m mmvttt` prints what was done; docs/patches.md has what, why, and how to do without.
"""

from collections.abc import Iterable

from . import amp, configs, images, launcher, mmcv_ext, names
from .patch import Patch, patches, run_all

__all__ = ['Patch', 'patches', 'setup']

# Importing these modules registers their patches.
_MODULES = (configs, mmcv_ext, names, images, launcher, amp)


def setup(skip: Iterable[str] = ()) -> None:
    """Applies every patch that this machine needs; called by `import mmvttt`.

    Args:
        skip: Names of patches to do without; what `import mmvttt` has applied of them is taken
            back. Those in the environment variable MMVTTT_SKIP_PATCHES are left out as well.

    Raises:
        ValueError: There is no patch of such a name.
    """
    run_all(skip)
