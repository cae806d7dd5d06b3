"""Small, named patches that keep one code base working across OpenMMLab, torch and mmcv builds.

Each is applied once the module that it changes has been imported, and changes no numbers of a
training. `python -m mmvttt --patches` lists them; docs/patches.md has what, why, and how to do
without.
"""

from .patch import PATCHES, Outcome, Patch, apply_patches, outcomes

__all__ = ['PATCHES', 'Outcome', 'Patch', 'apply_patches', 'outcomes']
