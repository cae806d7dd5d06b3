"""mmvttt: linear-time Test-Time-Training backbones for OpenMMLab."""

from .compat import setup as _setup_compat
from .version import __version__

_setup_compat()

__all__ = ['__version__']
