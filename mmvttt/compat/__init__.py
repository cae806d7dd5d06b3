"""Small, named patches that keep one code base working across OpenMMLab, torch and mmcv builds.

Patches import no toolbox, and change no numbers of a training. `python -m mmvttt --patches` lists
them; docs/patches.md has what, why, and how to do without.
"""

# Importing these modules registers their patches.
from . import amp, configs, launcher, mmcv_ext, names  # noqa: F401
from .patch import Patch, apply_patches, patches

__all__ = ['Patch', 'apply_patches', 'patches']
