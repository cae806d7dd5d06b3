"""Registries of mmvttt: children of mmengine's roots, so that `type='mmvttt.X'` resolves anywhere.

mmengine imports a registry's modules when a scoped type is looked up for the first time: a config
of mmdet, mmsegmentation or mmpretrain can name `mmvttt.Vittt` without `custom_imports`.
"""

import threading
from importlib import import_module
from typing import Any

from mmengine import registry as root

_MODULES = (
    'register', 'models', 'engine', 'reliability', 'datasets', 'analysis.inner_loop_hook',
)  # fmt: skip


class OwnRegistry(root.Registry):
    """A registry with the scope `mmvttt`.

    `on_demand` has modules by the type that they register. They import a toolbox, or diffusers, and
    are imported once a config names the type.
    """

    def __init__(self, name: str, parent: root.Registry | None = None, **on_demand: str) -> None:
        locations = [f'{__package__}.{module}' for module in _MODULES]
        super().__init__(name, parent=parent, scope='mmvttt', locations=locations)
        self.on_demand = on_demand

    def get(self, key: str) -> Any:
        """The class of a registered name, or None where there is none."""
        if isinstance(key, str):
            scope, _, name = key.rpartition('.')
            if scope in ('', self.scope) and name in self.on_demand:
                import_module(f'{__package__}.{self.on_demand[name]}')
        return super().get(key)


MODELS = OwnRegistry(
    'model',
    root.MODELS,
    MESAClassifier='models.mesa',
    FP32RoIExtractor='models.detection',
    BoxTTAModel='models.detection',
    DiT3='models.diffusion_transformers',
    LinearTransformer='models.diffusion_transformers',
)
HOOKS = OwnRegistry('hook', root.HOOKS)
TRANSFORMS = OwnRegistry('transform', root.TRANSFORMS, ResizeInto='export.file_model')
OPTIM_WRAPPERS = OwnRegistry('optim wrapper', root.OPTIM_WRAPPERS)
OPTIM_WRAPPER_CONSTRUCTORS = OwnRegistry('constructor', root.OPTIM_WRAPPER_CONSTRUCTORS)
DATASETS = OwnRegistry('dataset', root.DATASETS)
DATA_SAMPLERS = OwnRegistry('data sampler', root.DATA_SAMPLERS)
LOOPS = OwnRegistry('loop', root.LOOPS)
PARAM_SCHEDULERS = OwnRegistry('parameter scheduler', root.PARAM_SCHEDULERS)
WEIGHT_INITIALIZERS = OwnRegistry('weight initializer', root.WEIGHT_INITIALIZERS)
METRICS = OwnRegistry('metric', root.METRICS, TeacherAccuracy='models.mesa')
TASK_UTILS = OwnRegistry('task util', root.TASK_UTILS, FP32AnchorGenerator='models.detection')
STRATEGIES = OwnRegistry('strategy', root.STRATEGIES)
FUNCTIONS = OwnRegistry('function', root.FUNCTIONS)

# Held while parts are built: the default scope, by which types are found, is the process's.
BUILDING = threading.RLock()

# The parts of an inner training (docs/own_mixer.md). mmengine has no roots for them: a package of
# one's own registers here, or in a child with a scope of its own.
INNER_MODELS = OwnRegistry('inner model')
INNER_LOSSES = OwnRegistry('inner loss')
KEY_NORMS = OwnRegistry('key norm')

_PARTS = {'inner': INNER_MODELS, 'loss': INNER_LOSSES, 'key_norm': KEY_NORMS}


def foreign_part(option: str, name: str) -> Any:
    """The class or function of another package that an option of the library names, or None."""
    if option not in _PARTS:
        return resolve_type(name, root.MODELS, None)
    try:
        return _PARTS[option].get(name)
    except RuntimeError:
        return None


def resolve_type(kind: Any, registry: root.Registry, scope: str | None) -> Any:
    """The class that the `type` of a config means, or None where mmengine would not find it.

    `kind` is the class itself, as in pure-Python configs, its name with or without a scope, or its
    module and name, as such a config is dumped.
    """
    if not isinstance(kind, str):
        return kind
    with registry.switch_scope_and_registry(scope) as scoped:
        try:
            return scoped.get(kind)
        except RuntimeError:
            return None


def hook_class(hook: Any, scope: str | None) -> Any:
    """The class of a hook of a config, which may also be there built (see `resolve_type`)."""
    if not isinstance(hook, dict):
        return type(hook)
    return resolve_type(hook.get('type'), root.HOOKS, scope)


def type_name(kind: Any) -> str:
    """Short name of a config's `type`, for messages."""
    return getattr(kind, '__name__', str(kind))
