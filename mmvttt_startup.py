"""Start-up line of every Python of an environment with mmvttt: it opens the door of OpenMMLab.

A stock tool (`mim train mmdet …`, mmdet's own train.py, `from mmdet.apis import DetInferencer`)
reads `mmvttt::` configs and imports mmcv's operators before anything could import mmvttt. So
`mmvttt.pth` in site-packages imports this module, which waits for mmengine and then imports the
package that the line names. It never prints and never fails: `python -m mmvttt` says what is wrong
with an installation. A Python that never imports mmengine pays one look-up in a dict per import.

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

    Callback = Callable[[ModuleType], None]


class _Loader:
    """A module's own loader, with calls to make once the module has been executed."""

    def __init__(self, loader: 'Any', waiting: 'dict[str, list[Callback]]') -> None:
        self.loader = loader
        self.waiting = waiting

    def __getattr__(self, name: str) -> 'Any':
        return getattr(self.loader, name)

    def create_module(self, spec: 'ModuleSpec') -> 'ModuleType | None':
        return self.loader.create_module(spec)

    def exec_module(self, module: 'ModuleType') -> None:
        # The module sees its own loader only.
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        # A failed import and a copy that is not in sys.modules leave the calls to the next import.
        if module.__name__ in sys.modules:
            for callback in self.waiting.pop(module.__name__, []):
                callback(module)


class AfterImport:
    """A finder that makes calls after the import of certain modules.

    Attributes:
        waiting: Name of a module → the calls to make, with the module, once it has been executed.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(self, name: str, path: 'Any' = None, target: 'Any' = None) -> 'ModuleSpec | None':
        """The spec that the other finders have for an awaited module, its calls behind it."""
        if name not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, 'find_spec', None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, 'exec_module'):
                    spec.loader = _Loader(spec.loader, self.waiting)  # type: ignore[assignment]
                return spec
        return None


_finder = AfterImport()


def after_import(name: str, callback: 'Callback') -> None:
    """Calls back with a module once it is imported; at once if it is already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, '_initializing', False):
        callback(module)
        return
    # In front of finders that came later.
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(callback)


def install(package: str) -> None:
    """Imports a package once mmengine has been imported; called by `mmvttt.pth`."""

    def import_package(_: 'ModuleType') -> None:
        try:
            __import__(package)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # Programs that use mmengine without mmvttt must not notice that it is broken.
            pass

    if 'startup' not in os.environ.get('MMVTTT_SKIP_PATCHES', '').replace(' ', '').split(','):
        after_import('mmengine', import_package)
