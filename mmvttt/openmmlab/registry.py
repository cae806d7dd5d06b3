"""Registries of mmvttt: children of mmengine's roots, so that `type='mmvttt.X'` resolves anywhere.

mmengine imports a registry's modules when a scoped type is looked up for the first time: a config
of mmdet, mmsegmentation or mmpretrain can name `mmvttt.Vittt` without `custom_imports`.
"""

import threading
from importlib import import_module
from typing import Any

from mmengine import registry as root


class OwnRegistry(root.Registry):
    """A registry with the scope `mmvttt`.

    Args:
        name, parent: mmengine's.
        modules: Register its types, and are imported when a type of the scope is looked up.
        on_demand: Modules by the type that they register. They import a toolbox, or diffusers, and
            are imported once a config names the type.
    """

    def __init__(
        self, name: str, parent: root.Registry | None, *modules: str, **on_demand: str
    ) -> None:
        # Of a registry without modules mmengine warns.
        locations = [f'{__package__}.{module}' for module in modules or ('registry',)]
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
    *('register', 'models.diffusion_model', 'models.distil'),
    MESAClassifier='models.mesa',
    FP32RoIExtractor='models.detection',
    BoxTTAModel='models.detection',
    DiT3='models.diffusion_transformers',
    LinearTransformer='models.diffusion_transformers',
)
HOOKS = OwnRegistry(
    'hook',
    root.HOOKS,
    *(f'engine.hooks.{name}' for name in ('buffers', 'compile', 'ema', 'mesa', 'tf32')),
    *('reliability.anomaly_hook', 'reliability.checkpoint_hook'),
    *('models.distil', 'analysis.inner_loop_hook'),
)
TRANSFORMS = OwnRegistry('transform', root.TRANSFORMS, ResizeInto='export.file_model')
OPTIM_WRAPPERS = OwnRegistry('optim wrapper', root.OPTIM_WRAPPERS, 'engine.amp')
OPTIM_WRAPPER_CONSTRUCTORS = OwnRegistry(
    'constructor', root.OPTIM_WRAPPER_CONSTRUCTORS, 'engine.layer_decay'
)
DATASETS = OwnRegistry(
    'dataset',
    root.DATASETS,
    *('datasets.digit_images', 'datasets.latents', 'reliability.seeded_dataset'),
)
DATA_SAMPLERS = OwnRegistry('data sampler', root.DATA_SAMPLERS, 'reliability.exact_resume')
LOOPS = OwnRegistry('loop', root.LOOPS, 'reliability.exact_resume')
PARAM_SCHEDULERS = OwnRegistry('parameter scheduler', root.PARAM_SCHEDULERS, 'engine.schedules')
WEIGHT_INITIALIZERS = OwnRegistry('weight initializer', root.WEIGHT_INITIALIZERS, 'register')
METRICS = OwnRegistry('metric', root.METRICS, 'models.digit_quality', TeacherAccuracy='models.mesa')
TASK_UTILS = OwnRegistry('task util', root.TASK_UTILS, FP32AnchorGenerator='models.detection')
STRATEGIES = OwnRegistry('strategy', root.STRATEGIES, 'engine.fsdp')
FUNCTIONS = OwnRegistry('function', root.FUNCTIONS, 'engine.fsdp')

# Held while parts are built: the default scope, by which types are found, is the process's.
BUILDING = threading.RLock()

# The parts of an inner training (docs/own_mixer.md). mmengine has no roots for them: a package of
# one's own registers here, or in a child with a scope of its own.
INNER_MODELS = OwnRegistry('inner model', None, 'register')
INNER_LOSSES = OwnRegistry('inner loss', None, 'register')
KEY_NORMS = OwnRegistry('key norm', None, 'register')

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
