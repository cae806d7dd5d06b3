"""Small, named patches that keep one code base working across OpenMMLab, torch and mmcv builds.

Each patch is idempotent, does nothing where nothing is broken, and imports no toolbox: what
concerns mmcv or mmdet waits until somebody imports them. `python -m mmvttt` prints what was done.
"""

from . import amp, checkpoints, configs, files, launcher, mmcv_ext, rois
from .patch import Patch, patches, run_all

__all__ = ['Patch', 'patches', 'setup']

# Importing these modules registers their patches.
_MODULES = (configs, mmcv_ext, checkpoints, files, launcher, amp, rois)


def setup() -> None:
    """Applies every patch that this machine needs; called by `import mmvttt`."""
    run_all()
