"""The library's classes for configs: each is a `BaseModule` with `init_cfg`, under `mmvttt.X`."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mmengine.model import BaseModule, PretrainedInit
from mmengine.registry import MODELS as ROOT
from torch import nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.preparation import Preparation
from mmvttt.errors import OptionTypeError, suggest
from mmvttt.models import adapters, backbones
from mmvttt.models.adapters.vit_adapter import warn_of_unused
from mmvttt.models.generation.losses import DDPMLoss, FlowLoss
from mmvttt.models.inherit import load_inherited, load_inherited_head
from mmvttt.models.layers.inner_losses import INNER_LOSSES as OWN_LOSSES
from mmvttt.models.layers.inner_models import INNER_MODELS as OWN_INNER_MODELS
from mmvttt.models.layers.key_norms import KEY_NORMS as OWN_KEY_NORMS
from mmvttt.models.layers.mixer import MIXERS

from .registry import (
    INNER_LOSSES,
    INNER_MODELS,
    KEY_NORMS,
    MODELS,
    WEIGHT_INITIALIZERS,
    resolve_type,
)


class FromLibrary(BaseModule):
    """Builds a class of the library from a config. It is the base of all classes below.

    `init_cfg=dict(type='Pretrained', …)` loads by `load_pretrained`, which logs a report and fails
    where next to nothing matches. mmengine's own loading is `strict=False` and silent. With
    `ema=True` the averaged weights of the file are loaded, MESA's teacher for one.
    `dict(type='mmvttt.InheritViT', …)` takes the same options for the checkpoint of a ViT.

    Args:
        init_cfg: mmengine's.
        norm_cfg: OpenMMLab's name of `norm_layer`, where the class has one.
        options: The options of the class.
    """

    init_cfg: Any
    library_class: type[nn.Module]

    def __init__(self, *args: Any, init_cfg: Any = None, **options: Any) -> None:
        options = {**dict(zip(config_options(type(self)), args, strict=False)), **options}
        if 'norm_cfg' in options and 'norm_layer' in config_options(type(self)):
            if 'norm_layer' in options:
                raise OptionTypeError(
                    f'{type(self).__name__} gets norm_cfg and norm_layer, two names of one option: '
                    'give one of them.'
                )
            options['norm_layer'] = options.pop('norm_cfg')
        if 'pretrained' in options:
            raise OptionTypeError(
                f'{type(self).__name__} gets pretrained={options["pretrained"]!r} from a base of '
                'mmsegmentation: set model.pretrained=None; weights of this backbone are '
                "init_cfg=dict(type='Pretrained', checkpoint=…)"
            )
        if isinstance(options.get('backbone'), Mapping):
            warn_of_unused(options['backbone'])
            # With an init_cfg of its own.
            options['backbone'] = MODELS.build(options['backbone'])
        require_options(type(self), options)
        # BaseModule.__init__ would call the library's class without arguments.
        super(BaseModule, self).__init__(**options)
        self._is_init = False
        # Mean and deviation that the loaded weights were trained with; a training compares them.
        self.preparation: Preparation | None = None
        self.init_cfg = copy.deepcopy(init_cfg)

    def init_weights(self) -> None:
        """Initialises as mmengine does, then loads the `Pretrained` entries of `init_cfg`."""
        configs = self.init_cfg
        entries = [configs] if isinstance(configs, Mapping) else configs or []
        if not isinstance(entries, list | tuple) or not all(
            isinstance(entry, Mapping) and 'type' in entry for entry in entries
        ):
            raise OptionTypeError(
                f"init_cfg={configs!r}: give dict(type='Pretrained', checkpoint=…), another of "
                "mmengine's initialisers, or a list of them."
            )
        kinds = [resolve_type(c['type'], WEIGHT_INITIALIZERS, 'mmvttt') for c in entries]
        loaders = {PretrainedInit: load_pretrained, InheritViT: load_inherited}
        first_time = not self.is_init
        self.init_cfg = [c for c, kind in zip(entries, kinds, strict=True) if kind not in loaders]
        try:
            super().init_weights()
        finally:
            self.init_cfg = configs
        if first_time:
            for config, kind in zip(entries, kinds, strict=True):
                if kind in loaders:
                    options = {k: v for k, v in config.items() if k != 'type'}
                    report = loaders[kind](self, **options)
                    self.preparation = report.preparation or self.preparation


def config_options(kind: type) -> list[str]:
    """Names of the options of a registered class, in the order of its definition.

    A class of the library that passes options to its base takes the base's options too, except
    those that it sets itself.
    """
    kind = getattr(kind, 'library_class', kind)
    names: dict[str, None] = {}
    for part in inspect.getmro(kind):
        if '__init__' not in vars(part) or part is object:
            continue
        parameters = list(inspect.signature(vars(part)['__init__']).parameters.values())[1:]
        given = getattr(kind, 'derived_options', ())
        names |= {
            p.name: None
            for p in parameters
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given
        }
        if options := vars(part).get('options_class'):
            names |= dict.fromkeys(field.name for field in fields(options))
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def require_options(kind: type, options: Mapping[str, Any]) -> None:
    """Raises an error for an option that a class of the library lacks, and names its options."""
    names = [*config_options(kind), 'init_cfg']
    wrong = next((name for name in options if name not in names), None)
    if wrong is None:
        return
    shown = [('norm_cfg' if name == 'norm_layer' else name) for name in names]
    raise OptionTypeError(
        f'{kind.__name__} has no option {wrong!r}{suggest(wrong, shown)}; it has '
        f'{", ".join(shown)}. If it comes from a _base_, put _delete_=True into this dict'
    )


def register(kind: type[nn.Module]) -> type[nn.Module]:
    """Registers a backbone of one's own, with `init_cfg`, for configs of any toolbox.

    It decorates a class (docs/own_mixer.md), which a config names without a scope.

    Raises:
        KeyError: A model of that name is registered already.
    """
    made = _as_module(kind, kind.__module__)
    ROOT.register_module(module=made)
    return made


def _as_module(kind: type[nn.Module], module: str) -> type[nn.Module]:
    """A class of the library as a BaseModule."""
    attributes = {'__module__': module, '__doc__': kind.__doc__, 'library_class': kind}
    return type(kind.__name__, (FromLibrary, kind), attributes)


_KINDS = (*backbones.BACKBONES.values(), adapters.ViTAdapter, *MIXERS.values())
for _kind in _KINDS:
    globals()[_kind.__name__] = _as_module(_kind, __name__)
    MODELS.register_module(module=globals()[_kind.__name__])
__all__ = [kind.__name__ for kind in _KINDS]
for _loss in (DDPMLoss, FlowLoss):
    MODELS.register_module(module=_loss)
for _registry, _own in (
    (INNER_MODELS, OWN_INNER_MODELS),
    (INNER_LOSSES, OWN_LOSSES),
    (KEY_NORMS, OWN_KEY_NORMS),
):
    for _name, _part in _own.items():
        _registry.register_module(name=_name, module=_part)


@WEIGHT_INITIALIZERS.register_module()
class InheritViT:
    """Loads the checkpoint of a ViT into T⁵: `init_cfg=dict(type='mmvttt.InheritViT', …)`.

    It takes the options of `load_inherited`, or in a head of mmpretrain of `load_inherited_head`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, module: nn.Module) -> None:
        """Loads the weights into a linear head. `FromLibrary` calls `load_inherited` itself."""
        is_head = isinstance(getattr(module, 'fc', None), nn.Linear)
        (load_inherited_head if is_head else load_inherited)(module, **self.options)
