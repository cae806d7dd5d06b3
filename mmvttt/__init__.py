"""mmvttt: linear-time Test-Time-Training backbones for OpenMMLab."""

import sys
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .models.cpu_inference import optimize_for_cpu
    from .models.linearize import linearize

__all__ = ['__version__', 'linearize', 'optimize_for_cpu']


def __getattr__(name: str) -> Any:
    # Not imported with the package, which registers nothing and is quick.
    if name == 'linearize':
        from .models.linearize import linearize

        return linearize
    if name == 'optimize_for_cpu':
        from .models.cpu_inference import optimize_for_cpu

        return optimize_for_cpu
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _set_up() -> ImportError | None:
    """Applies the patches of mmvttt.compat; returns a failure for `python -m mmvttt` to show."""
    try:
        from .compat import apply_patches
        from .reliability import patches  # noqa: F401

        apply_patches()
    except ImportError as error:
        # While Python looks for the module of -m, that is what stands in the place of the script.
        if sys.argv[:1] == ['-m'] and 'mmvttt' in sys.orig_argv:
            return error
        if 'libGL' not in str(error) and 'libgthread' not in str(error):
            raise
        raise ImportError(
            f'OpenCV cannot be loaded ({error}): opencv-python needs libraries of a desktop, and '
            'lies in the same folder as opencv-python-headless, which does not; keep that one: '
            'pip uninstall -y opencv-python opencv-python-headless && '
            'pip install opencv-python-headless'
        ) from error
    return None


_failure = _set_up()
