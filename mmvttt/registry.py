"""Registries of mmvttt: children of mmengine's roots, so that `type='mmvttt.X'` resolves anywhere.

mmengine imports `locations` when a scoped type is looked up for the first time: a config of mmdet,
mmsegmentation or mmpretrain can name `mmvttt.Vittt` without `custom_imports`.
"""

from collections.abc import Collection
from importlib import import_module
from typing import Any

from mmengine import registry as root

_MODELS = ['mmvttt.models']
_ENGINE = ['mmvttt.engine']
_DATA = ['mmvttt.datasets']
_RELIABILITY = ['mmvttt.reliability']
_INNER_LOOP = ['mmvttt.analysis.inner_loop_hook']


def _child(name: str, parent: root.Registry, locations: list[str]) -> root.Registry:
    return root.Registry(name, parent=parent, scope='mmvttt', locations=locations)


MODELS = _child('model', root.MODELS, _MODELS)
HOOKS = _child('hook', root.HOOKS, _ENGINE + _RELIABILITY + _INNER_LOOP)
OPTIM_WRAPPERS = _child('optim wrapper', root.OPTIM_WRAPPERS, _ENGINE)
OPTIM_WRAPPER_CONSTRUCTORS = _child(
    'optim wrapper constructor', root.OPTIM_WRAPPER_CONSTRUCTORS, _ENGINE
)
DATASETS = _child('dataset', root.DATASETS, _RELIABILITY)
DATA_SAMPLERS = _child('data sampler', root.DATA_SAMPLERS, _RELIABILITY)
LOOPS = _child('loop', root.LOOPS, _RELIABILITY)
PARAM_SCHEDULERS = _child('parameter scheduler', root.PARAM_SCHEDULERS, _ENGINE)
WEIGHT_INITIALIZERS = _child('weight initializer', root.WEIGHT_INITIALIZERS, _MODELS)
METRICS = _child('metric', root.METRICS, _MODELS)
TRANSFORMS = _child('transform', root.TRANSFORMS, _DATA)
STRATEGIES = _child('strategy', root.STRATEGIES, _ENGINE)
FUNCTIONS = _child('function', root.FUNCTIONS, _ENGINE)

# The parts of an inner training (docs/own_mixer.md). mmengine has no roots for them: a package of
# one's own registers here, or in a child with a scope of its own.
INNER_MODELS = root.Registry('inner model', scope='mmvttt', locations=_MODELS)
INNER_LOSSES = root.Registry('inner loss', scope='mmvttt', locations=_MODELS)
KEY_NORMS = root.Registry('key norm', scope='mmvttt', locations=_MODELS)


def register_lazily(registry: root.Registry, module: str, name: str) -> None:
    """Registers a class whose module imports a toolbox, and is imported when the class is built."""

    def build(**config: Any) -> Any:
        return getattr(import_module(module), name)(**config)

    build.__name__ = build.__qualname__ = name
    registry.register_module(name=name, module=build)


def resolve(
    option: str, kind: Any, registry: root.Registry, names: Collection[str] | None = None
) -> Any:
    """The class or function that an option names in one of our registries.

    Args:
        option: Name of the option, for the error.
        kind: The class or function itself, or its registered name with or without a scope.
        registry: Registry to look it up in.
        names: Those that the error proposes; all of the registry's if None.

    Raises:
        TypeError: If `kind` is neither.
        ValueError: If the name is not registered.
    """
    if callable(kind):
        return kind
    proposed = ', '.join(map(repr, sorted(names or registry.module_dict)))
    if not isinstance(kind, str):
        raise TypeError(
            f'{option}={kind!r}: give a {registry.name}, or the name of one: {proposed}.'
        )
    try:
        found = registry.get(kind)
    except RuntimeError:
        found = None
    if found is None:
        raise ValueError(
            f'{option}={kind!r} is no registered {registry.name}: choose one of {proposed}, or '
            'register your own and import its module by custom_imports (docs/own_mixer.md).'
        )
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
