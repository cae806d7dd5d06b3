"""Plugin for OpenMMLab: registers `mmvttt.X` with mmengine, and applies patches.

Imported by the start-up line once mmengine is imported, by `custom_imports=['mmvttt']`, or
directly. It loads no model, kernel or toolbox: mmengine imports the registered types when a config
names one, and each patch is applied when its module is imported.
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ..distributions import missing

if find_spec('mmengine') is None:
    raise ModuleNotFoundError(f'mmvttt.openmmlab: {missing("mmengine")}', name='mmengine')

from mmvttt_startup import after_import

from . import registry
from .compat import apply_patches

apply_patches()
# The library looks up names of other packages here.
after_import('mmvttt.models.build', lambda build: build.set_resolver(registry.foreign_part))


def _offer_published(checkpoint: ModuleType) -> None:
    """Lets mmengine's loaders take `mmvttt://NAME`, like `torchvision://NAME`."""
    from mmvttt.checkpoints.published import SCHEME

    from .compat.checkpoints import load_safely

    # mmengine logs the part of the name after "load_from_".
    def load_from_mmvttt(filename: str, map_location: Any = None) -> Any:
        return load_safely(filename, map_location)

    checkpoint.CheckpointLoader.register_scheme(SCHEME, load_from_mmvttt, force=True)


after_import('mmengine.runner.checkpoint', _offer_published)


class _ToMMEngine(logging.Handler):
    """Forwards records of the library's loggers to mmengine's current logger."""

    def emit(self, record: logging.LogRecord) -> None:
        from mmengine.logging import print_log

        print_log(record.getMessage(), 'current', record.levelno)


_logger = logging.getLogger('mmvttt')
_logger.addHandler(_ToMMEngine())
_logger.setLevel(logging.INFO)


def __getattr__(name: str) -> Any:
    # Not `from . import`, which would call this function again.
    register = import_module('mmvttt.openmmlab.register')
    if name in register.__all__:
        return getattr(register, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
