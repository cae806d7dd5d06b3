"""Builds parts of a model from an option: a class, a callable, a name, or a dict.

`mixer=`, `inner=`, `loss=`, `key_norm=`, `norm_layer=` and `backbone=` all go through here. A name
is one of `parts`, the library's own. Names of other packages are looked up in OpenMMLab's
registries once `mmvttt.openmmlab` is imported. `option` is the option's name, for errors.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from mmvttt.errors import OptionError, OptionTypeError, suggest

# (option, name) → a class or function, or None.
Resolver = Callable[[str, str], Any]
SCOPE = 'mmvttt.'
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_resolvers: list[Resolver] = []


def set_resolver(resolver: Resolver) -> None:
    """Sets the look-up function for names of other packages."""
    _resolvers[:] = [resolver]


def find_part(option: str, kind: Any, parts: Mapping[str, Any]) -> Any:
    """The class or function of an option: itself, or a name with or without `mmvttt.`."""
    if not isinstance(kind, str):
        if isinstance(kind, nn.Module):
            raise OptionTypeError(
                f'{option} is one {type(kind).__name__}, which all blocks would share: give its '
                'class, or a dict with its type and options.'
            )
        if callable(kind):
            return kind
        raise OptionTypeError(
            f'{option}={kind!r}: give a class, a function, a dict with its type, or one of '
            f'{", ".join(map(repr, parts))}.'
        )
    if (name := kind.removeprefix(SCOPE)) in parts:
        return parts[name]
    for resolver in _resolvers:
        if (part := resolver(option, kind)) is not None:
            return part
    raise OptionError(
        f'{option}={kind!r} is not known{suggest(name, parts)}: give a '
        f'class, or one of {", ".join(map(repr, parts))}; names of other packages need '
        'mmvttt.openmmlab and their registration (docs/own_mixer.md).'
    )


def split_config(option: str, value: Any, parts: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class or function of an option, and the options beside `type` if it is a dict."""
    if not isinstance(value, Mapping):
        return find_part(option, value, parts), {}
    options = dict(value)
    if 'type' not in options:
        raise OptionTypeError(
            f'{option}={value!r} has no type: write dict(type={next(iter(parts), "…")!r}, …).'
        )
    return find_part(option, options.pop('type'), parts), options


def build_part(option: str, kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a class or function, with an error that names unknown options."""
    try:
        parameters = inspect.signature(kind)
    except ValueError:
        # Compiled functions have no signature.
        return kind(*args, **options)
    try:
        parameters.bind(*args, **options)
    except TypeError as error:
        taken = list(parameters.parameters.values())[len(args) :]
        names = [p.name for p in taken if p.kind not in _VARIADIC]
        wrong = next((name for name in options if name not in names), None)
        problem = f'has no option {wrong!r}' if wrong else f'lacks something: {error}'
        raise OptionTypeError(
            f'{option}: {getattr(kind, "__name__", kind)} {problem}{suggest(wrong or "", names)}; '
            f'it has {", ".join(names)}'
        ) from None
    return kind(*args, **options)


def build_function(option: str, value: Any, parts: Mapping[str, Any]) -> Callable[..., Any]:
    """A function from an option: itself, an instance of a class, or with the dict's arguments."""
    kind, options = split_config(option, value, parts)
    if isinstance(kind, type):
        return build_part(option, kind, **options)
    return partial(kind, **options) if options else kind
