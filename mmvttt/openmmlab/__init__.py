"""The door to OpenMMLab: registers `mmvttt.X` with mmengine, and repairs what it meets there.

Opened by the start-up line once mmengine is imported, by `custom_imports=['mmvttt']`, or by
importing this module. It loads no model, kernel or toolbox: mmengine asks for the registered types
when a config names one, and each patch waits for the module that it patches.
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

if find_spec('mmengine') is None:
    raise ImportError(
        'mmvttt.openmmlab needs mmengine, which is not installed: install a toolbox of OpenMMLab, '
        "for example pip install 'mmvttt[lite,det]'. mmvttt.linearize and mmvttt.models need none."
    )

from mmvttt_startup import after_import

from . import registry
from .compat import apply_patches

apply_patches()
# The library asks here for the names of other packages.
after_import('mmvttt.models.build', lambda build: build.set_resolver(registry.foreign_part))


def _offer_shipped(checkpoint: ModuleType) -> None:
    """Lets mmengine's loaders take `mmvttt://NAME`, as they take `torchvision://NAME`."""
    from mmvttt.checkpoints.shipped import SCHEME

    from .compat.checkpoints import load_safely

    # mmengine logs what follows "load_from_" in the name.
    def load_from_mmvttt(filename: str, map_location: Any = None) -> Any:
        return load_safely(filename, map_location)

    checkpoint.CheckpointLoader.register_scheme(SCHEME, load_from_mmvttt, force=True)


after_import('mmengine.runner.checkpoint', _offer_shipped)


class _ToMMEngine(logging.Handler):
    """Hands records of the library's loggers to the current logger of mmengine."""

    def emit(self, record: logging.LogRecord) -> None:
        from mmengine.logging import print_log

        print_log(record.getMessage(), 'current', record.levelno)


_logger = logging.getLogger('mmvttt')
_logger.addHandler(_ToMMEngine())
_logger.setLevel(logging.INFO)


def __getattr__(name: str) -> Any:
    # Not `from . import`, which would ask here again.
    register = import_module('mmvttt.openmmlab.register')
    if name in register.__all__:
        return getattr(register, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
