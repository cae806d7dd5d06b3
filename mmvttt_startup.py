"""Start-up line of every Python of an environment with mmvttt: mmengine brings mmvttt along.

A stock tool (`mim train mmdet …`, mmdet's own train.py, `from mmdet.apis import DetInferencer`)
reads `mmvttt::` configs and imports mmcv's operators before anything could import mmvttt. So the
line of `mmvttt.pth` in site-packages imports this module, which waits until mmengine has been
imported, and then imports mmvttt. It imports nothing itself: a Python that never sees mmengine pays
for one look at a name in each import.

MMVTTT_SKIP_PATCHES=startup leaves it out.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Names of patches to leave out, with commas between them.
SKIP = 'MMVTTT_SKIP_PATCHES'


def skipped() -> 'set[str]':
    """Names of the patches that the environment leaves out."""
    return {name for name in os.environ.get(SKIP, '').replace(' ', '').split(',') if name}


class AfterImport:
    """A finder that calls back when one module has been imported, and then takes itself out."""

    def __init__(self, name: str, callback: 'Callable[[ModuleType], None]') -> None:
        self.name = name
        self.callback = callback
        self._asking = False

    def find_spec(self, name: str, path: 'Any' = None, target: 'Any' = None) -> 'ModuleSpec | None':
        """The spec of the module that is waited for, with the callback behind its loader."""
        if name != self.name or self._asking:
            return None
        from importlib.util import find_spec

        self._asking = True
        try:
            spec = find_spec(name)
        finally:
            self._asking = False
        loader: Any = getattr(spec, 'loader', None)
        run = getattr(loader, 'exec_module', None)
        if run is not None:

            def run_and_call_back(module: 'ModuleType') -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                run(module)
                self.callback(module)

            loader.exec_module = run_and_call_back
        return spec


def after_import(name: str, callback: 'Callable[[ModuleType], None]') -> 'AfterImport | None':
    """Calls back with a module once it has been imported, at once if it is there already."""
    if name in sys.modules:
        callback(sys.modules[name])
        return None
    finder = AfterImport(name, callback)
    sys.meta_path.insert(0, finder)
    return finder


def _import_mmvttt(_: 'ModuleType') -> None:
    try:
        import mmvttt  # noqa: F401
    except Exception as error:
        # Programs that use mmengine without mmvttt must not fail because of it.
        import warnings

        warnings.warn(f'mmvttt could not be imported: {error}', stacklevel=2)


def install() -> None:
    """Waits for mmengine; called by `mmvttt.pth`."""
    if 'startup' not in skipped():
        after_import('mmengine', _import_mmvttt)
