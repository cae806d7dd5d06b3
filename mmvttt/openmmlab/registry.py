"""Registries of mmvttt: children of mmengine's roots, so that `type='mmvttt.X'` resolves anywhere.

mmengine imports `locations` when a scoped type is looked up for the first time: a config of mmdet,
mmsegmentation or mmpretrain can name `mmvttt.Vittt` without `custom_imports`.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mmengine import registry as root

_MODELS = ['mmvttt.openmmlab.register', 'mmvttt.openmmlab.models']
_ENGINE = ['mmvttt.openmmlab.engine']
_DATA = ['mmvttt.openmmlab.datasets']
_RELIABILITY = ['mmvttt.openmmlab.reliability']
_INNER_LOOP = ['mmvttt.openmmlab.analysis.inner_loop_hook']
_MESA = 'mmvttt.openmmlab.models.mesa'


class _Registry(root.Registry):
    """A child of one of mmengine's roots, with the scope `mmvttt`.

    Args:
        name: What its types are, for messages.
        parent: mmengine's root.
        locations: Modules that register types; mmengine imports them at the first look-up.
        on_demand: Type → module that registers it, imported once a config names the type: such a
            module imports a toolbox, or diffusers.
    """

    def __init__(
        self,
        name: str,
        parent: root.Registry,
        locations: list[str],
        on_demand: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, parent=parent, scope='mmvttt', locations=locations)
        self.on_demand = dict(on_demand or {})

    def get(self, key: str) -> Any:
        """The class of a registered name; None where there is none."""
        if isinstance(key, str):
            scope, _, name = key.rpartition('.')
            if scope in ('', self.scope) and name in self.on_demand:
                import_module(self.on_demand[name])
        return super().get(key)

    def names(self) -> list[str]:
        """All registered names, those on demand too."""
        self.import_from_location()
        return sorted({*self.module_dict, *self.on_demand})


MODELS = _Registry(
    'model',
    root.MODELS,
    _MODELS,
    {
        'MESAClassifier': _MESA,
        'FP32RoIExtractor': 'mmvttt.openmmlab.models.fp32_roi_extractor',
        'BoxTTAModel': 'mmvttt.openmmlab.models.box_tta',
        'DiT3': 'mmvttt.openmmlab.models.diffusion_transformers',
        'LinearTransformer': 'mmvttt.openmmlab.models.diffusion_transformers',
    },
)
HOOKS = _Registry('hook', root.HOOKS, _ENGINE + _RELIABILITY + _INNER_LOOP + _MODELS)
OPTIM_WRAPPERS = _Registry('optim wrapper', root.OPTIM_WRAPPERS, _ENGINE)
OPTIM_WRAPPER_CONSTRUCTORS = _Registry(
    'optim wrapper constructor', root.OPTIM_WRAPPER_CONSTRUCTORS, _ENGINE
)
DATASETS = _Registry('dataset', root.DATASETS, _RELIABILITY + _DATA)
DATA_SAMPLERS = _Registry('data sampler', root.DATA_SAMPLERS, _RELIABILITY)
LOOPS = _Registry('loop', root.LOOPS, _RELIABILITY)
PARAM_SCHEDULERS = _Registry('parameter scheduler', root.PARAM_SCHEDULERS, _ENGINE)
WEIGHT_INITIALIZERS = _Registry('weight initializer', root.WEIGHT_INITIALIZERS, _MODELS)
METRICS = _Registry('metric', root.METRICS, _MODELS, {'TeacherAccuracy': _MESA})
TRANSFORMS = _Registry('transform', root.TRANSFORMS, _DATA)
TASK_UTILS = _Registry(
    'task util',
    root.TASK_UTILS,
    [],
    {'FP32AnchorGenerator': 'mmvttt.openmmlab.models.fp32_anchor_generator'},
)
STRATEGIES = _Registry('strategy', root.STRATEGIES, _ENGINE)
FUNCTIONS = _Registry('function', root.FUNCTIONS, _ENGINE)

# The parts of an inner training (docs/own_mixer.md). mmengine has no roots for them: a package of
# one's own registers here, or in a child with a scope of its own.
INNER_MODELS = root.Registry('inner model', scope='mmvttt', locations=_MODELS)
INNER_LOSSES = root.Registry('inner loss', scope='mmvttt', locations=_MODELS)
KEY_NORMS = root.Registry('key norm', scope='mmvttt', locations=_MODELS)

_PARTS = {'inner': INNER_MODELS, 'loss': INNER_LOSSES, 'key_norm': KEY_NORMS}


def foreign_part(option: str, name: str) -> Any:
    """The registered part of another package that an option of the library names.

    Args:
        option: Name of the option: 'mixer', 'inner', 'loss', 'key_norm', 'norm_layer', ….
        name: Registered name, with the scope of its package or the current one.

    Returns:
        A class or function; None where mmengine finds none.
    """
    registry = _PARTS.get(option, root.MODELS)
    try:
        found = registry.get(name)
        if found is None and registry is root.MODELS:
            with registry.switch_scope_and_registry(None) as scoped:
                found = scoped.get(name)
    except RuntimeError:
        return None
    return found


def resolve_type(kind: Any, registry: root.Registry, scope: str | None) -> Any:
    """The class that the `type` of a config means.

    Args:
        kind: The class itself, as in pure-Python configs; its name, with or without a scope; or
            its module and name, as such a config is dumped.
        registry: mmengine's root of what it is.
        scope: The config's `default_scope`.

    Returns:
        None, where mmengine would not find it.
    """
    if not isinstance(kind, str):
        return kind
    with registry.switch_scope_and_registry(scope) as scoped:
        try:
            return scoped.get(kind)
        except RuntimeError:
            return None


def hook_class(hook: Any, scope: str | None) -> Any:
    """The class of a hook of a config, which may also be there built; see `resolve_type`."""
    if not isinstance(hook, dict):
        return type(hook)
    return resolve_type(hook.get('type'), root.HOOKS, scope)


def type_name(kind: Any) -> str:
    """Short name of a config's `type`, for messages."""
    return getattr(kind, '__name__', str(kind))
