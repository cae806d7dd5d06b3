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
# The modules that register our types.
for _registry in (
    registry.MODELS,
    registry.HOOKS,
    registry.WEIGHT_INITIALIZERS,
    registry.METRICS,
    registry.INNER_MODELS,
    registry.INNER_LOSSES,
    registry.KEY_NORMS,
):
    _registry.locate(__name__, 'register', 'models')
for _registry in (
    registry.HOOKS,
    registry.OPTIM_WRAPPERS,
    registry.OPTIM_WRAPPER_CONSTRUCTORS,
    registry.PARAM_SCHEDULERS,
    registry.STRATEGIES,
    registry.FUNCTIONS,
):
    _registry.locate(__name__, 'engine')
for _registry in (registry.HOOKS, registry.DATASETS, registry.DATA_SAMPLERS, registry.LOOPS):
    _registry.locate(__name__, 'reliability')
for _registry in (registry.DATASETS, registry.TRANSFORMS):
    _registry.locate(__name__, 'datasets')
registry.HOOKS.locate(__name__, 'analysis.inner_loop_hook')
registry.METRICS.locate(__name__, TeacherAccuracy='models.mesa')
registry.TASK_UTILS.locate(__name__, FP32AnchorGenerator='models.fp32_anchor_generator')
registry.MODELS.locate(
    __name__,
    MESAClassifier='models.mesa',
    FP32RoIExtractor='models.fp32_roi_extractor',
    BoxTTAModel='models.box_tta',
    DiT3='models.diffusion_transformers',
    LinearTransformer='models.diffusion_transformers',
)
# The library looks up names of other packages here.
after_import('mmvttt.models.build', lambda build: build.set_resolver(registry.foreign_part))


def _offer_shipped(checkpoint: ModuleType) -> None:
    """Lets mmengine's loaders take `mmvttt://NAME`, like `torchvision://NAME`."""
    from mmvttt.checkpoints.shipped import SCHEME

    from .compat.checkpoints import load_safely

    # mmengine logs the part of the name after "load_from_".
    def load_from_mmvttt(filename: str, map_location: Any = None) -> Any:
        return load_safely(filename, map_location)

    checkpoint.CheckpointLoader.register_scheme(SCHEME, load_from_mmvttt, force=True)


after_import('mmengine.runner.checkpoint', _offer_shipped)


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
