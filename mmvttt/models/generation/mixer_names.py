"""Mixers in a config of diffusers, which is JSON: classes and functions by importable names."""

import inspect
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import packages_distributions
from typing import Any

from torch import nn

from ..layers.inner_losses import INNER_LOSSES
from ..layers.inner_models import INNER_MODELS
from ..layers.key_norms import KEY_NORMS
from ..layers.mixers import MIXERS

_IMPORTABLE = re.compile(r'[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*')
# The library's parts, which have names of their own.
_OWN = {
    part: name
    for parts in (MIXERS, INNER_MODELS, INNER_LOSSES, KEY_NORMS)
    for name, part in parts.items()
}


def to_names(value: Any) -> Any:
    """A mixer's config with `package.module:Class` for every class and function in it.

    Raises:
        TypeError: A part is neither JSON nor a class or function.
    """
    if isinstance(value, Mapping):
        return {str(key): to_names(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_names(part) for part in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    # A class of mmvttt.openmmlab saves as the library's.
    value = getattr(value, 'library_class', value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return _OWN.get(value) or f'{value.__module__}:{value.__qualname__}'
    raise TypeError(
        f'mixer: {value!r} cannot be written into a config: give a class, a function, or a name.'
    )


def from_names(value: Any) -> Any:
    """A mixer's config with the classes named `package.module:Class`.

    A config may be untrusted, so this imports only modules of installed packages, and accepts only
    classes of `torch.nn.Module` from them or from modules that are already imported.

    Raises:
        ValueError: A name is not such a class.
    """
    if isinstance(value, Mapping):
        return {key: from_names(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(from_names(part) for part in value)
    if isinstance(value, str) and _IMPORTABLE.fullmatch(value):
        return _module_class(value)
    return value


def _module_class(name: str) -> type[nn.Module]:
    module, _, path = name.partition(':')
    refused = (
        f'mixer={name!r} is not a class of torch.nn.Module in an installed package: import its '
        'module first, or give the mixer itself, DiT3.from_pretrained(folder, mixer=dict(type=…)).'
    )
    if module not in sys.modules and module.partition('.')[0] not in packages_distributions():
        raise ValueError(refused)
    try:
        found: Any = import_module(module)
        for part in path.split('.'):
            found = vars(found)[part]
    except (ImportError, KeyError, TypeError) as error:
        raise ValueError(refused) from error
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise ValueError(refused)
    return found
