"""Registries of mmvttt: children of mmengine's roots, so that `type='mmvttt.X'` resolves anywhere.

mmengine imports a registry's modules (listed in `mmvttt.openmmlab`) when a scoped type is looked up
for the first time: a config of mmdet, mmsegmentation or mmpretrain can name `mmvttt.Vittt` without
`custom_imports`.
"""

from importlib import import_module
from typing import Any

from mmengine import registry as root


class OwnRegistry(root.Registry):
    """A registry with the scope `mmvttt`.

    `on_demand` has modules by the type that they register; they import a toolbox, or diffusers, and
    are imported once a config names the type.
    """

    _imported: bool

    def __init__(self, name: str, parent: root.Registry | None = None) -> None:
        super().__init__(name, parent=parent, scope='mmvttt')
        self.on_demand: dict[str, str] = {}

    def locate(self, package: str, *modules: str, **on_demand: str) -> None:
        """Names the modules, relative to a package, that register types at the first look-up."""
        self._locations += [f'{package}.{module}' for module in modules]
        self.on_demand |= {name: f'{package}.{module}' for name, module in on_demand.items()}

    def import_from_location(self) -> None:
        """Imports the modules. mmengine warns of a registry without any."""
        if not self._imported:
            for module in self._locations:
                import_module(module)
            self._imported = True

    def get(self, key: str) -> Any:
        """The class of a registered name; None where there is none."""
        if isinstance(key, str):
            scope, _, name = key.rpartition('.')
            if scope in ('', self.scope) and name in self.on_demand:
                import_module(self.on_demand[name])
        return super().get(key)

    def names(self) -> list[str]:
        """All registered names, including those on demand."""
        self.import_from_location()
        return sorted({*self.module_dict, *self.on_demand})


MODELS = OwnRegistry('model', root.MODELS)
HOOKS = OwnRegistry('hook', root.HOOKS)
OPTIM_WRAPPERS = OwnRegistry('optim wrapper', root.OPTIM_WRAPPERS)
OPTIM_WRAPPER_CONSTRUCTORS = OwnRegistry('constructor', root.OPTIM_WRAPPER_CONSTRUCTORS)
DATASETS = OwnRegistry('dataset', root.DATASETS)
DATA_SAMPLERS = OwnRegistry('data sampler', root.DATA_SAMPLERS)
LOOPS = OwnRegistry('loop', root.LOOPS)
PARAM_SCHEDULERS = OwnRegistry('parameter scheduler', root.PARAM_SCHEDULERS)
WEIGHT_INITIALIZERS = OwnRegistry('weight initializer', root.WEIGHT_INITIALIZERS)
METRICS = OwnRegistry('metric', root.METRICS)
TRANSFORMS = OwnRegistry('transform', root.TRANSFORMS)
TASK_UTILS = OwnRegistry('task util', root.TASK_UTILS)
STRATEGIES = OwnRegistry('strategy', root.STRATEGIES)
FUNCTIONS = OwnRegistry('function', root.FUNCTIONS)

# The parts of an inner training (docs/own_mixer.md). mmengine has no roots for them: a package of
# one's own registers here, or in a child with a scope of its own.
INNER_MODELS = OwnRegistry('inner model')
INNER_LOSSES = OwnRegistry('inner loss')
KEY_NORMS = OwnRegistry('key norm')

_PARTS = {'inner': INNER_MODELS, 'loss': INNER_LOSSES, 'key_norm': KEY_NORMS}


def foreign_part(option: str, name: str) -> Any:
    """The class or function of another package that an option of the library names, or None."""
    registry = _PARTS.get(option, root.MODELS)
    try:
        part = registry.get(name)
        if part is None and registry is root.MODELS:
            with registry.switch_scope_and_registry(None) as scoped:
                part = scoped.get(name)
    except RuntimeError:
        return None
    return part


def resolve_type(kind: Any, registry: root.Registry, scope: str | None) -> Any:
    """The class that the `type` of a config means; None where mmengine would not find it.

    `kind` is the class itself, as in pure-Python configs; its name, with or without a scope; or its
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
    """The class of a hook of a config, which may also be there built; see `resolve_type`."""
    if not isinstance(hook, dict):
        return type(hook)
    return resolve_type(hook.get('type'), root.HOOKS, scope)


def type_name(kind: Any) -> str:
    """Short name of a config's `type`, for messages."""
    return getattr(kind, '__name__', str(kind))
