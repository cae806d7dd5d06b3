"""Options of mixers as JSON: parts by their names in mmvttt's own tables.

A config.json may come from anybody. Its names are looked up only in these tables. Unlike `build`,
which reads options in code, this module neither imports parts nor asks OpenMMLab's registries.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmvttt.errors import OptionError

from ..build import SCOPE
from .inner_losses import INNER_LOSSES
from .inner_models import INNER_MODELS
from .key_norms import KEY_NORMS
from .norms import ACTIVATIONS

Tables = Mapping[str, Mapping[str, Any]]
# Option → the parts that a file may name.
_PARTS: dict[str, Mapping[str, Any]] = {
    'inner': INNER_MODELS,
    'loss': INNER_LOSSES,
    'key_norm': KEY_NORMS,
    'gate_cfg': ACTIVATIONS,
}


def to_json(
    options: Mapping[str, Any], tables: Tables = MappingProxyType({}), foreign: bool = False
) -> dict[str, Any]:
    """Options as a config.json holds them.

    Args:
        options: Options of a mixer or of `linearize`.
        tables: Further options → the parts that they name.
        foreign: Whether to write classes and functions of other packages, as
            `package.module:name`. `from_json` does not read them.
    """
    parts = {**_PARTS, **tables}.values()
    names = {part: name for table in parts for name, part in table.items()}
    named = {option: _named(value, names, foreign) for option, value in options.items()}
    for option, value in named.items():
        try:
            named[option] = json.loads(json.dumps(value))
        except TypeError as error:
            raise OptionError(
                f'{option}={value!r} cannot be written into config.json, by which the model is '
                'loaded again: give names and numbers, such as the name of an inner model of '
                'mmvttt in the place of its class.'
            ) from error
    return named


def from_json(options: Mapping[str, Any], tables: Tables = MappingProxyType({})) -> dict[str, Any]:
    """Options of a config.json, with the parts that they name.

    Args:
        options: As they were read.
        tables: Further options → the parts that they may name.
    """
    parts = {**_PARTS, **tables}
    return {option: _part(option, value, parts) for option, value in options.items()}


def _named(value: Any, names: Mapping[Any, str], foreign: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(part, names, foreign) for key, part in value.items()}
    # A class of mmvttt.openmmlab saves as the library's.
    value = getattr(value, 'library_class', value)
    if not callable(value) or not hasattr(value, '__qualname__'):
        return value
    return names.get(value, f'{value.__module__}:{value.__qualname__}' if foreign else value)


def _part(option: str, value: Any, tables: Tables) -> Any:
    if isinstance(value, Mapping):
        rest = from_json({name: part for name, part in value.items() if name != 'type'}, tables)
        return (
            {'type': _look_up(option, value['type'], tables), **rest} if 'type' in value else rest
        )
    return _look_up(option, value, tables) if option in tables and value is not None else value


def _look_up(option: str, name: Any, tables: Tables) -> Any:
    parts = tables.get(option, {})
    short = name.removeprefix(SCOPE) if isinstance(name, str) else ''
    if short not in parts:
        raise OptionError(
            f'{option}={name!r} in a config.json: a file may only name '
            f'{", ".join(map(repr, parts)) or "parts of " + ", ".join(tables)}. For a part of '
            'another package, give the option in code.'
        )
    return parts[short]
